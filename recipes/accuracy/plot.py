"""The curves as a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from common.errors import RecipeError
from common.pictures import import_pyplot

from accuracy.analysis import Attempt
from accuracy.curves import smoothed
from accuracy.records import Record

__all__ = ["mean_curve", "plot"]


def plot(file: Path, shown: Sequence[Attempt], records: Sequence[Record], target: float) -> None:
    """Draw accuracy (smoothed) and loss of every attempt, mean over its seeds as far as all of them were trained.

    Raises:
        RecipeError: matplotlib is missing, or does not know the kind of picture.

    """
    pyplot = import_pyplot()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(14, 6), constrained_layout=True)
    left.axhline(target, color="gray", linestyle="--", label=f"target {target:.3f}")
    for attempt in shown:
        runs = [run for run in records if (run.setting, run.learning_rate) == (attempt.setting, attempt.learning_rate)]
        label = f"{attempt.setting}, {attempt.learning_rate:g}"
        _line(left, mean_curve({run.seed: _accuracies(run) for run in runs}), label)
        _line(right, mean_curve({run.seed: _losses(run) for run in runs}), label)
    for axes, title in ((left, "validation accuracy, smoothed"), (right, "validation loss")):
        axes.set(title=title, xlabel="samples")
        axes.grid(alpha=0.3)
    left.legend(fontsize="small")
    try:
        figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
    except (OSError, ValueError) as error:
        raise RecipeError(f"--plot {file}: {error}.") from error
    pyplot.close(figure)


def mean_curve(by_seed: Mapping[int, Sequence[tuple[int, float]]]) -> list[tuple[int, float]]:
    """Return (samples, mean of the seeds' values), up to where the shortest curve ends."""
    return [(together[0][0], fmean(value for _, value in together)) for together in zip(*by_seed.values(), strict=False)]


def _accuracies(run: Record) -> list[tuple[int, float]]:
    return [(point.samples, accuracy) for point, accuracy in zip(run.curve, smoothed(run.curve), strict=False)]


def _losses(run: Record) -> list[tuple[int, float]]:
    return [(point.samples, point.loss) for point in run.curve]


def _line(axes: Any, curve: Sequence[tuple[int, float]], label: str) -> None:
    axes.plot([samples for samples, _ in curve], [value for _, value in curve], label=label, marker=".")
