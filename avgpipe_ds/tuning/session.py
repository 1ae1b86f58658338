"""Tuning at the start of a run: its first iterations are profiled while they train, and something is done with the profile."""

from __future__ import annotations

from collections.abc import Callable

from avgpipe_ds.config import AvgPipeConfig
from avgpipe_ds.tuning.profile import Profile
from avgpipe_ds.tuning.profiler import Profiler

__all__ = ["TuningSession"]

_WARM_UP = 2
"""Iterations before the profile: the first ones allocate and connect."""


class TuningSession:
    """Follows the calls of `train_batch`, whichever data they have.

    Args:
        iterations: to profile.
        conclude: what to do with the profile, the same on every rank; it returns the configuration to go on with.

    """

    def __init__(self, iterations: int, conclude: Callable[[Profile], AvgPipeConfig]) -> None:
        self._iterations = iterations
        self._conclude = conclude
        self._trained = 0
        self._profiler: Profiler | None = None

    @property
    def ends_with_next(self) -> bool:
        """Whether the next iteration is the last of the profile, after which nothing may be under way."""
        return self._trained == _WARM_UP + self._iterations - 1

    def trained(self, make_profiler: Callable[[], Profiler]) -> AvgPipeConfig | None:
        """An iteration was trained. Every rank calls it after each.

        Returns:
            After the last of them, what there is to go on with.

        """
        self._trained += 1
        if self._trained == _WARM_UP:
            self._profiler = make_profiler()
            self._profiler.begin()
        if self._trained < _WARM_UP + self._iterations:
            return None
        assert self._profiler is not None
        return self._conclude(self._profiler.finish())
