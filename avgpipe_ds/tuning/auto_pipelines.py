"""`"num_pipelines": "auto"`: the first iterations of a run train one pipeline and profile it, then as many go on as are fastest.

M is the data loader's and stays; `avgpipe-tune` chooses it, too.
"""

from __future__ import annotations

from collections.abc import Callable

from avgpipe_ds import deepspeed_compat as compat
from avgpipe_ds.config import AvgPipeConfig
from avgpipe_ds.tuning.choice import Candidate, best, rank
from avgpipe_ds.tuning.prediction import Prediction
from avgpipe_ds.tuning.predictors import predictor_named
from avgpipe_ds.tuning.profile import Profile
from avgpipe_ds.tuning.profiler import Profiler
from avgpipe_ds.tuning.setting import Setting

__all__ = ["WARM_UP", "AutoPipelines"]

WARM_UP = 2
"""Iterations before the profile: the first ones allocate and connect."""


class AutoPipelines:
    """Follows the first iterations and says when, and with how many pipelines, to go on.

    Args:
        config: as the user wrote it, with "auto".
        build: makes the engines of further pipelines, from the weights that training began with; collective.

    Attributes:
        build: as given.

    """

    def __init__(self, config: AvgPipeConfig, build: Callable[[int], list[compat.StageEngine]]) -> None:
        self.build = build
        self._config = config
        self._trained = 0
        self._profiler: Profiler | None = None

    def is_last(self) -> bool:
        """Whether the next iteration is the last of the profile, after which nothing may be under way."""
        return self._trained == WARM_UP + self._config.tuning.iterations - 1

    def trained(self, profiler: Callable[[], Profiler]) -> AvgPipeConfig | None:
        """An iteration was trained. Every rank calls it after each.

        Returns:
            After the last of them, the configuration to go on with; the same on all ranks.

        Raises:
            AvgPipeError: no number of pipelines fits into the memory limit.

        """
        self._trained += 1
        if self._trained == WARM_UP:
            self._profiler = profiler()
            self._profiler.begin()
        if self._trained < WARM_UP + self._config.tuning.iterations:
            return None
        assert self._profiler is not None
        return self._config.model_copy(update={"num_pipelines": self._choose(self._profiler.finish()).setting.num_pipelines})

    def _choose(self, profile: Profile) -> Prediction:
        tuning = self._config.tuning
        advance = 0 if self._config.schedule.advance == "auto" else self._config.schedule.advance
        settings = [
            Setting(num_pipelines=number, num_micro_batches=profile.num_micro_batches, advance=advance)
            for number in range(1, tuning.max_pipelines + 1)
        ]
        candidates: list[Candidate] = rank(
            profile, settings, predictor_named(tuning.predictor), memory_limit_gb=self._config.memory_limit_gb
        )
        return best(candidates)
