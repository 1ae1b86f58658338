"""Which of the N pipelines a stage serves first when several could compute."""

from __future__ import annotations

from avgpipe_ds.schedules.actions import Kind

__all__ = ["priority"]


def priority(*, iteration: int, pipeline_id: int, kind: Kind) -> tuple[int, int, int]:
    """Sort key of a runnable computation: the executor and the simulator run the smallest first.

    Args:
        iteration: t of the batch that it belongs to.
        pipeline_id: i, 0 .. N-1.
        kind: "F" or "B".

    """
    return iteration, 0 if kind == "B" else 1, pipeline_id
