"""The engines that are compared, and how they are chosen."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from common.suggest import pick
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from bench.contenders.base import Contender, Training
from bench.contenders.data_parallel import DataParallel
from bench.contenders.deepspeed_pipeline import DeepSpeedPipeline
from bench.contenders.dualpipev import DualPipeV
from bench.contenders.elastic import Elastic
from bench.contenders.torch_pipelining import Placement, TorchPipelining

__all__ = ["BASELINE", "Contender", "Training", "all_contenders", "choose"]

BASELINE = DeepSpeedPipeline(key="deepspeed-1f1b", name="DeepSpeed PipelineEngine")
"""What the others are compared with."""


def all_contenders(pipelines: Sequence[int] = (1, 2, 3, 4), advance: int = 1, *, trace: str | None = None) -> list[Contender]:
    """The rows of the table.

    Args:
        pipelines: the N of this project's engine.
        advance: of its rows with advance forward.
        trace: folder for the timelines of its rows.
    """
    ours = (row for number in pipelines for row in _elastic(number, advance))
    return [BASELINE, *_rivals(), *(replace(row, trace=trace) for row in ours)]


def choose(keys: Sequence[str], known: Sequence[Contender]) -> list[Contender]:
    """The contenders with these keys, in the table's order; the baseline is always among them.

    Raises:
        ValueError: there is no such key; names the nearest.
    """
    wanted = {BASELINE.key, *(pick(key, [contender.key for contender in known], what="contender") for key in keys)}
    return [contender for contender in known if contender.key in wanted]


def _rivals() -> list[Contender]:
    rows: list[tuple[str, type[Any], Placement]] = [
        ("gpipe", ScheduleGPipe, "pairs"),
        ("1f1b", Schedule1F1B, "pairs"),
        ("interleaved", ScheduleInterleaved1F1B, "loop"),
        ("interleaved-zb", ScheduleInterleavedZeroBubble, "loop"),
        ("zbv", ScheduleZBVZeroBubble, "v"),
        ("dualpipev", ScheduleDualPipeV, "v"),
    ]
    return [
        DualPipeV(key="deepspeed-dualpipev", name="DeepSpeed DualPipeV"),
        DataParallel(key="deepspeed-zero0", name="DeepSpeed data parallel", zero_stage=0),
        DataParallel(key="deepspeed-zero1", name="DeepSpeed data parallel, ZeRO-1", zero_stage=1),
        *(
            TorchPipelining(
                key=f"torch-{key}",
                name=f"torch {schedule.__name__.removeprefix('Schedule')}",
                schedule=schedule,
                placement=placement,
            )
            for key, schedule, placement in rows
        ),
    ]


def _elastic(number: int, advance: int) -> list[Elastic]:
    key, name = f"avgpipe-n{number}", f"avgpipe_ds, N = {number}"
    one_f_one_b = Elastic(key=key, name=f"{name}, 1F1B", num_pipelines=number)
    gpipe = Elastic(key=f"{key}-gpipe", name=f"{name}, GPipe", num_pipelines=number, schedule="gpipe")
    ahead = Elastic(
        key=f"{key}-advance{advance}",
        name=f"{name}, advance {advance}",
        num_pipelines=number,
        schedule="advance_forward",
        advance=advance,
    )
    shared = Elastic(key=f"{key}-shared", name=f"{name}, B/{number} each", num_pipelines=number, shared=True)
    return [one_f_one_b, gpipe, ahead] if number == 1 else [one_f_one_b, ahead, shared]
