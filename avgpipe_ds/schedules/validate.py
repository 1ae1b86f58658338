"""Whether plans are a schedule at all; that they do not deadlock is for the simulator to show."""

from __future__ import annotations

from collections.abc import Sequence

from avgpipe_ds.errors import ScheduleError
from avgpipe_ds.schedules.actions import Action, Kind
from avgpipe_ds.schedules.plans import Plan
from avgpipe_ds.schedules.timetable import plan_grid

__all__ = ["validate"]


def validate(plans: Sequence[Plan], *, forward_only: bool = False) -> None:
    """Check that every stage computes each micro-batch once, in order, and its backward after its forward.

    Args:
        plans: one plan per stage.
        forward_only: the plans are of evaluation, without backwards.

    Raises:
        ScheduleError: with the timetable, the bad place in brackets.

    """
    if not plans:
        raise ScheduleError("a schedule needs at least one stage, got none")
    num_micro_batches = max(sum(action.kind == "F" for action in actions) for actions in plans)
    for stage_id, actions in enumerate(plans):
        next_of: dict[Kind, int] = {"F": 0, "B": 0}
        for position, action in enumerate((*actions, None)):
            problem = _problem(action, next_of, num_micro_batches, forward_only)
            if problem:
                grid = plan_grid(plans, marks={stage_id: position})
                raise ScheduleError(f"invalid schedule, stage {stage_id}, position {position}: {problem}\n{grid}")
            if action is not None:
                next_of[action.kind] += 1


def _problem(action: Action | None, next_of: dict[Kind, int], num_micro_batches: int, forward_only: bool) -> str:
    """What is wrong with `action` (None: with ending) after `next_of` forwards and backwards; empty if nothing is."""
    if action is None:
        num_backwards = 0 if forward_only else num_micro_batches
        if (next_of["F"], next_of["B"]) == (num_micro_batches, num_backwards):
            return ""
        return (
            f"ends after {next_of['F']} forwards and {next_of['B']} backwards, expected {num_micro_batches} and {num_backwards}"
        )
    if action.kind == "B" and forward_only:
        return "a backward in a forward-only schedule"
    if action.micro_batch != next_of[action.kind]:
        return f"expected {action.kind}{next_of[action.kind]}, got {action}: each micro-batch once, in increasing order"
    if action.kind == "B" and action.micro_batch >= next_of["F"]:
        return f"{action} comes before its forward"
    return ""
