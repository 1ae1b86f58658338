"""Pictures beside the tables: speeds as bars, accuracies as curves."""

import json
from collections.abc import Callable
from pathlib import Path

from accuracy.analysis import attempts, compare
from accuracy.plot import plot as plot_curves
from accuracy.records import read_all
from accuracy.target import target_accuracy
from common.pictures import import_pyplot

__all__ = ["Drawer", "bars", "curves"]

Drawer = Callable[[list[Path], Path], None]
"""Draws raw results into a file."""


def bars(files: list[Path], picture: Path) -> None:
    """One measurement, the fastest on top: the median ratio of each row, and as a line from the least to the largest.

    Raises:
        RecipeError: matplotlib is missing.

    """
    pyplot = import_pyplot()
    (file,) = files
    rows = sorted(json.loads(file.read_text())["rows"], key=lambda row: float(row["median_speedup"]))
    medians = [row["median_speedup"] for row in rows]
    below = [row["median_speedup"] - row["min_speedup"] for row in rows]
    above = [row["max_speedup"] - row["median_speedup"] for row in rows]
    figure, axes = pyplot.subplots(figsize=(8, 1 + 0.28 * len(rows)), constrained_layout=True)
    colors = ["tab:blue" if row["num_pipelines"] > 1 else "lightgray" for row in rows]
    axes.barh([f"{row['name']}, M = {row['num_micro_batches']}" for row in rows], medians, xerr=(below, above), color=colors)
    axes.axvline(1.0, color="gray", linestyle="--", linewidth=1)
    axes.set(xlabel="samples per second, times DeepSpeed's PipelineEngine")
    axes.bar_label(axes.containers[-1], fmt="%.2f", label_type="center", fontsize="small")
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, metadata={"Date": None})
    pyplot.close(figure)


def curves(fraction: float) -> Drawer:
    """Accuracy and loss over the samples, of each setting at its best learning rate to `fraction` of the reference's accuracy."""

    def draw(files: list[Path], picture: Path) -> None:
        records = read_all(file for file in files if file.suffix == ".jsonl")
        goal = target_accuracy(records, fraction)
        picture.parent.mkdir(parents=True, exist_ok=True)
        plot_curves(picture, [row.attempt for row in compare(attempts(records, goal))], records, goal)

    return draw
