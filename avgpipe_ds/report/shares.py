"""Where each accelerator's time went: the bubble report.

A rank's main thread does one thing at a time, so every nanosecond belongs to exactly one span, the innermost; what lies in a
`train_batch` and in nothing else is the executor's own. On a GPU, where computation is launched and not waited for, the shares
are those of the launching thread.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from avgpipe_ds.report.load import common_window
from avgpipe_ds.tracing.own_time import own_time
from avgpipe_ds.tracing.spans import (
    AVERAGING,
    CLIPPING_NORM,
    IDLE,
    OPTIMIZER_STEP,
    TAKE_DATA,
    Span,
    StageTrace,
)

__all__ = ["CATEGORIES", "StageShares", "shares_of"]

COMPUTE = "compute"
EXECUTOR = "executor"
OUTSIDE = "outside train_batch"
_IDLE = {
    "activation": "waiting for activations",
    "gradient": "waiting for gradients",
    "data": "data",
    "peers": "waiting for peers",
    "turn": "waiting for its turn",
    "evaluation": OUTSIDE,
}
_WORK = {
    "ForwardPass": COMPUTE,
    "AdvanceForwardPass": COMPUTE,
    "BackwardPass": COMPUTE,
    "SendActivation": "sending",
    "SendGrad": "sending",
    OPTIMIZER_STEP: "optimizer step",
    CLIPPING_NORM: "optimizer step",
    AVERAGING: "averaging",
    TAKE_DATA: "data",
}
CATEGORIES = tuple(dict.fromkeys([COMPUTE, *_IDLE.values(), *_WORK.values(), EXECUTOR]))
"""In the order of a report; their shares add up to 1."""


@dataclass(frozen=True, slots=True)
class StageShares:
    """One rank's time.

    Attributes:
        rank, stage_id: of the rank.
        seconds: the common window of all ranks.
        shares: fraction of it by category.

    """

    rank: int
    stage_id: int
    seconds: float
    shares: dict[str, float]


def shares_of(traces: list[StageTrace]) -> list[StageShares]:
    """One per trace, over the time that all of them cover."""
    start_ns, end_ns = common_window(traces)
    return [
        StageShares(trace.rank, trace.stage_id, (end_ns - start_ns) / 1e9, _shares(trace, start_ns, end_ns)) for trace in traces
    ]


def _shares(trace: StageTrace, start_ns: int, end_ns: int) -> dict[str, float]:
    own_ns: defaultdict[str, int] = defaultdict(int)
    for span, pieces in own_time(trace.spans):
        own_ns[_category(span)] += sum(max(0, min(b, end_ns) - max(a, start_ns)) for a, b in pieces)
    own_ns[OUTSIDE] += end_ns - start_ns - sum(own_ns.values())
    return {category: own_ns[category] / (end_ns - start_ns) for category in CATEGORIES}


def _category(span: Span) -> str:
    return _IDLE[span.detail] if span.name == IDLE else _WORK.get(span.name, EXECUTOR)
