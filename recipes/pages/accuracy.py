"""Tables of what `time_to_accuracy.py` found: samples to an accuracy."""

from pathlib import Path

from accuracy.analysis import attempts, compare
from accuracy.records import read_all
from accuracy.report import cells, columns, remarks
from accuracy.target import target_accuracy

from pages.blocks import Maker
from pages.markdown import table

__all__ = ["accuracy"]


def accuracy(fraction: float, *, every_rate: bool = False) -> Maker:
    """What makes a table of samples to `fraction` of the reference's accuracy; its files are runs (.jsonl).

    Args:
        fraction: of the reference's best accuracy.
        every_rate: a row for each learning rate, not only for the best.

    """

    def make(files: list[Path]) -> str:
        records = read_all(files)
        goal = target_accuracy(records, fraction)
        rows = compare(attempts(records, goal), every_rate=every_rate)
        if every_rate:
            rows = sorted(rows, key=lambda row: (row.attempt.setting, row.attempt.learning_rate))
        text = f"Target: {goal:.4f}, {fraction:.0%} of the reference's best accuracy.\n\n"
        cut = [cells(row, {}) for row in rows]
        return text + table(columns({}), cut) + "\n\n" + "\n".join(remarks(records[0].conditions, goal))

    return make
