"""A grid of settings, measured, and predicted from one profile."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import typer
from common.process_groups import released_process_groups

from avgpipe_ds.memory.breakdown import Breakdown
from avgpipe_ds.tuning.choice import best, rank
from avgpipe_ds.tuning.prediction import Prediction, predict
from avgpipe_ds.tuning.predictors import PREDICTORS, predictor_named
from avgpipe_ds.tuning.profile import Profile
from avgpipe_ds.tuning.setting import Setting
from bench.adaptive import Search
from bench.contenders.elastic import Elastic
from bench.measure import measure
from bench.workload import Workload

__all__ = ["Conclusions", "Measurement", "conclusions", "grid", "measure_grid", "take_profile"]


@dataclass(kw_only=True)
class Measurement:
    """One setting.

    Attributes:
        setting: which one.
        seconds: per B samples, one number per repeat.
        memory: by rank, of the repeat in which it was largest.
    """

    setting: Setting
    seconds: list[float] = field(default_factory=list)
    memory: list[Breakdown] = field(default_factory=list)

    @property
    def median_s(self) -> float:
        """Seconds per B samples."""
        return statistics.median(self.seconds)


@dataclass(frozen=True, kw_only=True)
class Conclusions:
    """What the comparison says.

    Attributes:
        profile_s: seconds that the profile took, the building of the engine included.
        two_settings_s: what trying two settings for 20 batches each takes, in the median of the grid.
        measured: the grid.
        predicted: by predictor, of each setting.
        chosen: by predictor, from the grid.
        searches: runs that found the advance out.
        message_share: seconds that an activation of the profile travels, as a part of its forward on the first stage.
    """

    profile_s: float
    two_settings_s: float
    measured: list[Measurement]
    predicted: dict[str, list[Prediction]]
    chosen: dict[str, Setting]
    searches: list[Search]
    message_share: float

    def loss(self, search: Search) -> float:
        """How much longer than with the fastest advance of the grid an iteration takes with the one that was settled on."""
        same = {
            one.setting.advance: one.median_s
            for one in self.measured
            if replace(one.setting, advance=0) == replace(search.start, advance=0)
        }
        return same.get(search.settled.advance, math.nan) / min(same.values()) - 1

    def predicted_s(self, name: str, place: int) -> float:
        """Seconds per B samples."""
        prediction = self.predicted[name][place]
        return prediction.iteration_s / prediction.setting.num_pipelines

    def regret(self, name: str) -> float:
        """How much longer the setting that a predictor chose takes than the best one, as measured."""
        by_setting = {one.setting: one.median_s for one in self.measured}
        return by_setting[self.chosen[name]] / min(by_setting.values()) - 1

    def correlation(self, name: str) -> float:
        """Of the ranks of predicted and measured times (Spearman's)."""
        predicted = [self.predicted_s(name, place) for place in range(len(self.measured))]
        return statistics.correlation(_ranks(predicted), _ranks([one.median_s for one in self.measured]))

    def memory_error(self, place: int) -> float:
        """The largest relative error of the memory predicted for a stage."""
        prediction = self.predicted[PREDICTORS[0]][place]
        pairs = zip(prediction.memory, self.measured[place].memory, strict=True)
        return max((expected.total / found.total - 1 for expected, found in pairs), key=abs)

    def as_json(self) -> dict[str, Any]:
        """Everything."""
        return {
            "profile_s": self.profile_s,
            "two_settings_s": self.two_settings_s,
            "message_share": self.message_share,
            "searches": [search.as_json() for search in self.searches],
            "predictors": {
                name: {
                    "chosen": asdict(self.chosen[name]),
                    "regret": self.regret(name),
                    "rank_correlation": self.correlation(name),
                }
                for name in PREDICTORS
            },
            "settings": [
                {
                    **asdict(one.setting),
                    "seconds": one.seconds,
                    "predicted_s": {name: self.predicted_s(name, place) for name in PREDICTORS},
                    "memory_by_rank": [asdict(memory) for memory in one.memory],
                    "predicted_memory": [asdict(memory) for memory in self.predicted[PREDICTORS[0]][place].memory],
                }
                for place, one in enumerate(self.measured)
            ],
        }


def grid(pipelines: Sequence[int], micro_batches: Sequence[int], advances: Sequence[int], *, batch: int) -> list[Setting]:
    """All combinations.

    Raises:
        typer.BadParameter: an M does not divide the batch.
    """
    for number in micro_batches:
        if batch % number:
            raise typer.BadParameter(f"--micro-batches {number} does not divide a batch of {batch} samples")
    return [
        Setting(num_pipelines=N, num_micro_batches=M, advance=a)
        for N in pipelines
        for M in micro_batches
        for a in advances
        if a == 0 or a <= M - 2  # beyond that the advance changes nothing
    ]


def take_profile(workload: Workload, num_micro_batches: int, *, iterations: int) -> tuple[Profile, float]:
    """A profile of one pipeline, and the seconds that it took. Every rank calls it."""
    start = time.perf_counter()
    with released_process_groups():
        training = _contender(Setting(num_pipelines=1, num_micro_batches=num_micro_batches)).build(workload, num_micro_batches)
        try:
            training.train_batch()
            profile: Profile = training.engine.profile(training.data, iterations=iterations)
        finally:
            training.close()
        del training
    return profile, time.perf_counter() - start


def measure_grid(
    workload: Workload, settings: Sequence[Setting], *, batches: int, repeats: int, warmup: int, say: Callable[[str], None]
) -> list[Measurement]:
    """Time all settings in alternation. Every rank calls it."""
    measured = [Measurement(setting=setting) for setting in settings]
    for repeat in range(repeats):
        for one in measured:
            found = measure(
                _contender(one.setting),
                workload,
                one.setting.num_micro_batches,
                batches=batches,
                warmup=warmup,
                memory_of_first=True,  # so does a limit count
            )
            one.seconds.append(found.seconds)
            if not one.memory or max(m.total for m in found.memory) > max(m.total for m in one.memory):
                one.memory = found.memory
            say(f"repeat {repeat + 1} of {repeats}: {one.setting}: {found.seconds:.4f} s")
    return measured


def conclusions(profile: Profile, profile_s: float, measured: list[Measurement], searches: list[Search]) -> Conclusions:
    """Predict what was measured, and choose from it."""
    first = profile.stages[0]
    settings = [one.setting for one in measured]
    predictors = {name: predictor_named(name) for name in PREDICTORS}
    return Conclusions(
        profile_s=profile_s,
        two_settings_s=2 * 20 * statistics.median(one.median_s * one.setting.num_pipelines for one in measured),
        measured=measured,
        predicted={name: [predict(profile, setting, one) for setting in settings] for name, one in predictors.items()},
        chosen={name: best(rank(profile, settings, one)).setting for name, one in predictors.items()},
        searches=searches,
        message_share=first.activation.seconds(1.0) / first.forward_s(profile.micro_batch),
    )


def _contender(setting: Setting) -> Elastic:
    return Elastic(
        key="tuned",
        name=str(setting),
        num_pipelines=setting.num_pipelines,
        schedule="advance_forward" if setting.advance else "1f1b",
        advance=setting.advance,
    )


def _ranks(values: Sequence[float]) -> list[float]:
    """Places in ascending order; times are never quite equal."""
    order = sorted(range(len(values)), key=lambda place: values[place])
    ranks = [0.0] * len(values)
    for rank_, place in enumerate(order):
        ranks[place] = float(rank_)
    return ranks
