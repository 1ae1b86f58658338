"""The accuracy to reach, read off the reference's runs. Pure."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean

from common.errors import RecipeError

from accuracy.curves import final_accuracy
from accuracy.records import Record
from accuracy.settings import REFERENCE

__all__ = ["reference_accuracy", "target_accuracy"]


def reference_accuracy(records: Iterable[Record]) -> dict[float, float]:
    """Return the reference's accuracy at the end of the budget, mean over the seeds, by learning rate."""
    by_rate: dict[float, list[Record]] = defaultdict(list)
    for record in records:
        if record.setting == REFERENCE.name:
            by_rate[record.learning_rate].append(record)
    return {rate: fmean(final_accuracy(record.curve) for record in runs) for rate, runs in sorted(by_rate.items())}


def target_accuracy(records: Sequence[Record], fraction: float) -> float:
    """Return `fraction` of the reference's accuracy at its best learning rate.

    Raises:
        RecipeError: there is no run of the reference.

    """
    accuracies = reference_accuracy(records)
    if not accuracies:
        raise RecipeError("No run of the reference is in the files: run `reference` first, or give the target by --target.")
    return fraction * max(accuracies.values())
