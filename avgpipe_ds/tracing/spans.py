"""What a trace consists of.

The main thread of a rank does one thing at a time, so its spans nest: an optimizer step holds the averaging, a `train_batch`
holds everything. What is left of a span when its children are taken out is its own time; that of `train_batch` is the executor's
overhead. Only `Wait` lies outside of this order: a pipeline waits while others compute.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

__all__ = ["AVERAGING", "CLIPPING_NORM", "IDLE", "OPTIMIZER_STEP", "TAKE_DATA", "TRAIN_BATCH", "WAIT", "Span", "StageTrace"]

# DeepSpeed's instructions go by their own names: ForwardPass, BackwardPass, SendActivation ... Beside them there are
TRAIN_BATCH = "TrainBatch"
OPTIMIZER_STEP = "OptimizerStep"
CLIPPING_NORM = "ClippingNorm"
AVERAGING = "Averaging"
TAKE_DATA = "TakeData"
IDLE = "Idle"
"""No pipeline could go on; `detail` is what the one waited for that went on first."""
WAIT = "Wait"
"""A pipeline could not go on, or another one came first; `detail` is what it needed."""


class Span(NamedTuple):
    """Something that took time on one rank.

    Attributes:
        name: an instruction, or one of the names above.
        start_ns, end_ns: on the rank's own clock.
        pipeline_id, iteration, micro_batch: -1 where it belongs to none.
        detail: of a wait: "activation", "gradient", "data", "peers" or "turn".

    """

    name: str
    start_ns: int
    end_ns: int
    pipeline_id: int = -1
    iteration: int = -1
    micro_batch: int = -1
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTrace:
    """What one rank recorded.

    Attributes:
        run: a name that all ranks of a job share, and no other job has.
        rank, num_ranks: global.
        stage_id, num_stages: k and K.
        replica_id: which data-parallel replica.
        num_pipelines, num_micro_batches: N and M.
        window_ns: from the start of the first traced `train_batch` to the end of the last.
        spans: in order of their ends.

    """

    run: str
    rank: int
    num_ranks: int
    stage_id: int
    num_stages: int
    replica_id: int
    num_pipelines: int
    num_micro_batches: int
    window_ns: tuple[int, int]
    spans: tuple[Span, ...]

    def shifted(self, by_ns: int) -> StageTrace:
        """The same on a clock that shows `by_ns` more."""
        spans = tuple(s._replace(start_ns=s.start_ns + by_ns, end_ns=s.end_ns + by_ns) for s in self.spans)
        return replace(self, window_ns=(self.window_ns[0] + by_ns, self.window_ns[1] + by_ns), spans=spans)
