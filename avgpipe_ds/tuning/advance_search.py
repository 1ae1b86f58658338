"""Algorithm 1 of the paper (section 4.2): raise the advance for as long as iterations get faster and memory allows it.

The paper compares one iteration with the next. Where times are noisy that settles on noise, so here an advance a and a + 1 take
turns, a few iterations each, until the difference of their medians is clear or no longer worth knowing. The turns go a, a + 1,
a + 1, a, so that a machine that gets slower by and by does it to both.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["AdvanceSearch", "Decision"]

_TURNS = (False, True, True, False)
"""Whether a turn tries one advance more."""
_MOST_ROUNDS = 3
"""Of those turns; what is not clear by then is smaller than the noise."""
_SURE = 3.0
"""Standard errors that a difference must have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What was decided, and why; for the log.

    Attributes:
        advance: to go on with.
        settled: whether it stays.
        reason: one sentence.

    """

    advance: int
    settled: bool
    reason: str


@dataclass(slots=True)
class AdvanceSearch:
    """Decides from the seconds of iterations, turn by turn. Every rank that sees the same numbers decides the same.

    Args:
        max_advance: the largest that changes anything.
        min_gain: the least part of an iteration that a step has to save, however clear it is; a step costs memory.
        advance: where to start; a run that continues starts where it was.
        settled: whether that stays.

    """

    max_advance: int
    min_gain: float = 0.01
    advance: int = 0
    settled: bool = False
    _turn: int = 0
    _seconds: dict[int, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.max_advance < 0 or not 0 <= self.advance:
            raise ValueError(f"expected advances of at least 0, got {self.advance} of at most {self.max_advance}")

    @property
    def running(self) -> int:
        """The advance of the next iteration."""
        return self.advance + (not self.settled and _TURNS[self._turn % len(_TURNS)])

    def refuse(self, reason: str) -> Decision:
        """The next advance does not fit into memory, or can't be had for another reason: stay with the present one."""
        return self._settle(reason)

    def observe(self, seconds: Sequence[float]) -> Decision | None:
        """Take in a turn: the times of some iterations that all ran with `running`; the next turn may have another one.

        Returns:
            None while nothing is decided.

        """
        if self.settled:
            return None
        if self.advance >= self.max_advance:
            return self._settle(f"advance {self.advance} is the largest that changes anything")
        self._seconds.setdefault(self.running, []).extend(seconds)
        self._turn += 1
        if self._turn % len(_TURNS):
            return None
        return self._compare(self._seconds[self.advance], self._seconds[self.advance + 1])

    def _compare(self, now: list[float], more: list[float]) -> Decision | None:
        middle, error = statistics.median(now), math.hypot(_standard_error(now), _standard_error(more))
        gain = 1 - statistics.median(more) / middle
        sure = abs(gain) * middle > _SURE * error
        measured = f"{gain:+.1%} of {middle:.4g} s, with an error of {error / middle:.1%}, after {len(now)} iterations each"
        if sure and gain >= self.min_gain:
            self.advance += 1
            self._begin()
            return Decision(advance=self.advance, settled=False, reason=f"advance {self.advance} saves {measured}")
        if sure or self._turn >= _MOST_ROUNDS * len(_TURNS):
            return self._settle(f"advance {self.advance + 1} does not save enough: {measured}")
        return None

    def restart(self) -> None:
        """Begin the present comparison anew."""
        self._begin()

    def _settle(self, reason: str) -> Decision:
        self.settled = True
        self._begin()
        return Decision(advance=self.advance, settled=True, reason=reason)

    def _begin(self) -> None:
        self._turn = 0
        self._seconds.clear()


def _standard_error(values: list[float]) -> float:
    """Of the median, as for values of a normal distribution with outliers."""
    middle = statistics.median(values)
    deviation = 1.4826 * statistics.median(abs(value - middle) for value in values)
    return 1.2533 * deviation / math.sqrt(len(values))
