"""What computing takes on a stage while it trains, read off its timeline. Pure."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from avgpipe_ds.tracing.own_time import own_time
from avgpipe_ds.tracing.spans import AVERAGING, CLIPPING_NORM, IDLE, OPTIMIZER_STEP, TRAIN_BATCH, Span

__all__ = ["TrainingTimes", "training_times"]

_FORWARD = ("ForwardPass", "AdvanceForwardPass")
_BACKWARD = ("BackwardPass",)
_STEP = (OPTIMIZER_STEP, CLIPPING_NORM, AVERAGING)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingTimes:
    """Of one stage.

    Attributes:
        forward_s, backward_s: of a micro-batch; medians.
        step_s: of one pipeline's optimizer step, with clipping and averaging.
        overhead_s: of the executor, messages and data, for each forward and each backward.
        utilisation: part of each of equal intervals of the whole time in which the stage computed forwards and backwards.

    """

    forward_s: float
    backward_s: float
    step_s: float
    overhead_s: float
    utilisation: tuple[float, ...]


def training_times(spans: Sequence[Span], *, intervals: int = 50) -> TrainingTimes:
    """Read them off the spans of some whole iterations.

    Raises:
        ValueError: there is no whole iteration among them.

    """
    own_ns: defaultdict[str, int] = defaultdict(int)
    for span, pieces in own_time(spans):
        own_ns[span.name] += sum(end - start for start, end in pieces)
    lengths: defaultdict[str, list[int]] = defaultdict(list)
    for span in spans:
        lengths[span.name].append(span.end_ns - span.start_ns)
    forwards, backwards = ([length for name in names for length in lengths[name]] for names in (_FORWARD, _BACKWARD))
    if not forwards or not backwards or not lengths[OPTIMIZER_STEP]:
        raise ValueError("expected the spans of at least one whole iteration")
    known = {*_FORWARD, *_BACKWARD, *_STEP, IDLE}
    rest_ns = sum(value for name, value in own_ns.items() if name not in known)
    return TrainingTimes(
        forward_s=statistics.median(forwards) / 1e9,
        backward_s=statistics.median(backwards) / 1e9,
        step_s=sum(own_ns[name] for name in _STEP) / len(lengths[OPTIMIZER_STEP]) / 1e9,
        overhead_s=rest_ns / (len(forwards) + len(backwards)) / 1e9,
        utilisation=_utilisation(spans, intervals),
    )


def _utilisation(spans: Sequence[Span], intervals: int) -> tuple[float, ...]:
    start_ns = min(span.start_ns for span in spans if span.name == TRAIN_BATCH)
    end_ns = max(span.end_ns for span in spans if span.name == TRAIN_BATCH)
    length_ns = (end_ns - start_ns) / intervals
    busy_ns = [0.0] * intervals
    for span in spans:
        if span.name not in (*_FORWARD, *_BACKWARD):
            continue
        for place in range(intervals):
            left = start_ns + place * length_ns
            busy_ns[place] += max(0.0, min(span.end_ns, left + length_ns) - max(span.start_ns, left))
    return tuple(min(1.0, busy / length_ns) for busy in busy_ns)
