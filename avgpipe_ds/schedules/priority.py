"""Which of the N pipelines a stage serves first when several could compute."""

from __future__ import annotations

from avgpipe_ds.schedules.actions import Kind

__all__ = ["priority"]


def priority(*, iteration: int, pipeline_id: int, kind: Kind) -> tuple[int, int, int]:
    """Sort key of a runnable computation: the executor and the simulator run the smallest first.

    Backwards first, whatever their iteration: the stages before this one wait for them, while forwards of a pipeline that already
    runs ahead fill gaps. Then the older iteration: optimizer steps are taken in order, so a stage must not feed the pipeline in
    front. Then the pipeline that steps first. Of the orders that were simulated this one was the best or tied with the best at
    nearly every setting; docs/schedules.md has the table.

    Args:
        iteration: t of the batch that the computation belongs to.
        pipeline_id: i, 0 .. N-1.
        kind: "F" or "B".

    """
    return 0 if kind == "B" else 1, iteration, pipeline_id
