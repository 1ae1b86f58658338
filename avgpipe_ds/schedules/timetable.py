"""Text pictures of schedules: one row per stage, to be read in a terminal or an error message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from avgpipe_ds.schedules.actions import Action

__all__ = ["TimedAction", "plan_grid", "time_grid"]


class TimedAction(Protocol):
    """A computation with its place and time, as the simulator records it."""

    @property
    def stage_id(self) -> int: ...  # noqa: D102
    @property
    def pipeline_id(self) -> int: ...  # noqa: D102
    @property
    def action(self) -> Action: ...  # noqa: D102
    @property
    def start_s(self) -> float: ...  # noqa: D102
    @property
    def end_s(self) -> float: ...  # noqa: D102


def plan_grid(plans: Sequence[Sequence[Action]], *, marks: Mapping[int, int] | None = None) -> str:
    """The actions of each stage in order, without time, so that it can show plans that could never run.

    Args:
        plans: one plan per stage.
        marks: stage -> position of the action to put in brackets; the length of the plan marks its end.

    """
    rows = []
    for stage_id, actions in enumerate(plans):
        cells = [f" {action} " for action in actions]
        mark = (marks or {}).get(stage_id)
        if mark is not None:
            cells.append(" end ")
            cells[mark] = f"[{cells[mark].strip()}]"
        rows.append(cells)
    width = max((len(cell) for cells in rows for cell in cells), default=0)
    return "\n".join(f"stage {k}  {''.join(cell.ljust(width) for cell in cells)}".rstrip() for k, cells in enumerate(rows))


def time_grid(events: Sequence[TimedAction], *, num_stages: int) -> str:
    """What each stage computes over time; the shortest computation is as wide as its label, dots are idle time.

    With several pipelines a label starts with the pipeline: `1F0` is the forward of micro-batch 0 in pipeline 1.

    Args:
        events: computations that do not overlap on a stage.
        num_stages: K, the number of rows.

    """
    if not events:
        return "\n".join(f"stage {stage_id}" for stage_id in range(num_stages))
    prefixed = any(event.pipeline_id > 0 for event in events)
    labels = [f"{event.pipeline_id if prefixed else ''}{event.action}" for event in events]
    columns_per_s = (max(map(len, labels)) + 1) / min(event.end_s - event.start_s for event in events)
    rows = [["."] * round(max(event.end_s for event in events) * columns_per_s) for _ in range(num_stages)]
    for event, label in zip(events, labels, strict=True):
        start, end = round(event.start_s * columns_per_s), round(event.end_s * columns_per_s)
        rows[event.stage_id][start:end] = f"{label.ljust(end - start - 1, '-')} "
    return "\n".join(f"stage {stage_id}  {''.join(row)}".rstrip() for stage_id, row in enumerate(rows))
