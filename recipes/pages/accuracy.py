"""Tables of what `time_to_accuracy.py` found, alone and with the speeds that `benchmark.py` measured."""

import json
import math
from collections.abc import Mapping
from pathlib import Path

from accuracy.analysis import attempts, compare
from accuracy.records import read_all
from accuracy.report import cells, columns, remarks, time_ratio
from accuracy.target import target_accuracy

from pages.blocks import Maker
from pages.markdown import table

__all__ = ["accuracy"]


def accuracy(fraction: float, *, every_rate: bool = False) -> Maker:
    """What makes a table of samples to `fraction` of the reference's accuracy, and of seconds if speeds are among the files.

    Its files are runs (.jsonl) and results of the benchmark (.json), of which the first is of batch B, others of multiples of it.
    With speeds it has the settings whose speed is known.

    Args:
        fraction: of the reference's best accuracy.
        every_rate: a row for each learning rate, not only for the best.

    """

    def make(files: list[Path]) -> str:
        records = read_all(file for file in files if file.suffix == ".jsonl")
        speeds = _speeds([file for file in files if file.suffix == ".json"])
        goal = target_accuracy(records, fraction)
        rows = compare(attempts(records, goal), every_rate=every_rate)
        if every_rate:
            rows = sorted(rows, key=lambda row: (row.attempt.setting, row.attempt.learning_rate))
        if speeds:
            rows = [row for row in rows if not math.isnan(time_ratio(row, speeds))]
        text = f"Target: {goal:.4f}, {fraction:.0%} of the reference's best accuracy.\n\n"
        cut = [cells(row, speeds) for row in rows]
        return text + table(columns(speeds), cut) + "\n\n" + "\n".join(remarks(records[0].conditions, goal))

    return make


def _speeds(files: list[Path]) -> Mapping[str, float]:
    """Seconds per sample by contender; one with F times the batch of the first file is called "<contender>-Fx"."""
    speeds: dict[str, float] = {}
    base = 0
    for file in files:
        found = json.loads(file.read_text())
        base = base or found["workload"]["batch"]
        factor = found["workload"]["batch"] / base
        for row in found["rows"]:
            speeds[row["key"] if factor == 1 else f"{row['key']}-{factor:g}x"] = row["seconds_per_sample"]
    return speeds
