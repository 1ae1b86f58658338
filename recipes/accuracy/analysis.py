"""From the runs to a comparison: each setting at its best learning rate, seed by seed against DeepSpeed with one batch. Pure.

A run that never reaches the target is not dropped, which would flatter its setting, but counts as infinitely many samples.
Medians can take that; means could not.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from common.errors import RecipeError

from accuracy.curves import final_accuracy, passed_clearly, samples_to_target
from accuracy.records import Record

__all__ = ["BASE", "Attempt", "Comparison", "attempts", "best_of_each", "compare"]

#: What the others are compared with.
BASE = "deepspeed-1x"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A setting at one learning rate.

    Attributes:
        samples: to the target, by seed; infinite where it was never reached.
        final_accuracy: mean of the seeds, at the end of the run or where it stopped.

    """

    setting: str
    learning_rate: float
    samples: Mapping[int, float]
    final_accuracy: float

    @property
    def num_reached(self) -> int:
        """How many seeds reached the target."""
        return sum(math.isfinite(samples) for samples in self.samples.values())

    @property
    def median_samples(self) -> float:
        """Over the seeds; infinite where half of them never reached the target."""
        return median(self.samples.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """An attempt beside the base at its own best learning rate.

    Attributes:
        num_rates: learning rates that the setting was tried at; this is the best of them.
        ratios: samples to the target as a multiple of the base's, by seed; only of seeds with which the base reached it.

    """

    attempt: Attempt
    num_rates: int
    ratios: Mapping[int, float]

    @property
    def median_ratio(self) -> float:
        """Over the seeds; NaN where there is nothing to compare with."""
        return median(self.ratios.values()) if self.ratios else math.nan


def attempts(records: Iterable[Record], target: float) -> list[Attempt]:
    """Group the runs by setting and learning rate, in the order in which they first come.

    Raises:
        RecipeError: a run stopped early at a lower target, so that nobody knows when it would have reached this one.

    """
    grouped: dict[tuple[str, float], list[Record]] = defaultdict(list)
    for record in records:
        grouped[record.setting, record.learning_rate].append(record)
    return [
        Attempt(
            setting=setting,
            learning_rate=rate,
            samples={run.seed: _samples(run, target) for run in sorted(runs, key=lambda run: run.seed)},
            final_accuracy=fmean(final_accuracy(run.curve) for run in runs),
        )
        for (setting, rate), runs in grouped.items()
    ]


def best_of_each(tried: Iterable[Attempt]) -> dict[str, Attempt]:
    """Return each setting's best attempt, by setting.

    Only learning rates with the most seeds finished are considered, for a grid may be unfinished. Of these, the one with which
    the most seeds reach the target, then with the fewest samples in the median, then with the highest accuracy.
    """
    by_setting: dict[str, list[Attempt]] = defaultdict(list)
    for attempt in tried:
        by_setting[attempt.setting].append(attempt)
    return {
        setting: min(group, key=lambda one: (-len(one.samples), -one.num_reached, one.median_samples, -one.final_accuracy))
        for setting, group in by_setting.items()
    }


def compare(tried: Sequence[Attempt], *, every_rate: bool = False) -> list[Comparison]:
    """Compare each setting's best attempt with the base's, or with `every_rate` all attempts."""
    best = best_of_each(tried)
    base = best[BASE].samples if BASE in best else {}
    return [
        Comparison(
            attempt=attempt,
            num_rates=sum(other.setting == attempt.setting for other in tried),
            ratios={
                seed: samples / base[seed] for seed, samples in attempt.samples.items() if math.isfinite(base.get(seed, math.inf))
            },
        )
        for attempt in (tried if every_rate else best.values())
    ]


def _samples(run: Record, target: float) -> float:
    samples = samples_to_target(run.curve, target)
    if samples is not None:
        return samples
    if run.stopped_at is not None and run.stopped_at < target and passed_clearly(run.curve, run.stopped_at):
        raise RecipeError(
            f"The target is {target:.4f}, but {run.setting} with learning rate {run.learning_rate:g} and seed {run.seed} stopped"
            f" early, at {run.stopped_at:.4f}: give a --target of at most that, or train again with the higher one."
        )
    return math.inf
