"""Plans lowered to DeepSpeed's instructions.

DeepSpeed's `TrainSchedule` computes in the same order as ours at advance 0, but places a send next to the receive of the
following step, because its exchanges block and have to pair up. Here sends never block, so an exchange belongs to the computation
that needs or makes it: one step is one computation with its receive before it and its send after it.

A buffer is a slot that holds one micro-batch from its forward to its backward. Forwards and backwards come in order, so the
stored micro-batches are a consecutive run of at most `num_pipe_buffers()`, and `micro_batch % num_pipe_buffers()` never collides.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from deepspeed.runtime.pipe.schedule import (
    BackwardPass,
    ForwardPass,
    LoadMicroBatch,
    OptimizerStep,
    PipeInstruction,
    PipeSchedule,
    RecvActivation,
    RecvGrad,
    ReduceGrads,
    ReduceTiedGrads,
    SendActivation,
    SendGrad,
)

from avgpipe_ds.config import ScheduleConfig
from avgpipe_ds.errors import ScheduleError
from avgpipe_ds.schedules.actions import Action
from avgpipe_ds.schedules.plans import Plan, forward_only_plan, peak_stored, plan_all_stages
from avgpipe_ds.schedules.simulate import simulate, timetable
from avgpipe_ds.schedules.validate import validate

__all__ = [
    "AdvanceForwardPass",
    "AdvanceForwardSchedule",
    "ForwardOnlySchedule",
    "GPipeSchedule",
    "LoweredSchedule",
    "OneForwardOneBackwardSchedule",
    "PlannedSchedule",
    "make_schedule",
]


class AdvanceForwardPass(ForwardPass):  # type: ignore[misc]  # deepspeed has no types
    """A forward that runs ahead of 1F1B, in what would be a bubble (paper, section 4)."""


class LoweredSchedule(PipeSchedule):  # type: ignore[misc]
    """The instructions of one stage for one batch, derived from its compute plan.

    Args:
        micro_batches: M.
        stages: K.
        stage_id: k, 0 .. K-1.
        plans: the plan of every stage.

    Attributes:
        plans: as given.
        plan: that of this stage.

    Raises:
        ValueError: `stage_id` is out of range.

    """

    def __init__(self, micro_batches: int, stages: int, stage_id: int, *, plans: tuple[Plan, ...]) -> None:
        super().__init__(micro_batches, stages, stage_id)
        if not 0 <= stage_id < stages:
            raise ValueError(f"stage_id must be in 0 .. {stages - 1} with {stages} stages, got {stage_id}")
        self.plans = plans
        self.plan = plans[stage_id]
        self._num_slots = peak_stored(self.plan)

    def num_pipe_buffers(self) -> int:
        """Slots this stage needs: the most micro-batches that it stores at a time."""
        return self._num_slots

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield one list of instructions per computation."""
        for action in self.plan:
            yield self._forward(action) if action.kind == "F" else self._backward(action)

    def _forward(self, action: Action) -> list[PipeInstruction]:
        where = self._where(action)
        instructions: list[PipeInstruction] = []
        if not self.is_first_stage:
            instructions.append(RecvActivation(**where))
        if self.is_first_stage or self.is_last_stage:  # inputs and labels
            instructions.append(LoadMicroBatch(**where))
        instructions.append(AdvanceForwardPass(**where) if action.advanced else ForwardPass(**where))
        if not self.is_last_stage:
            instructions.append(SendActivation(**where))
        return instructions

    def _backward(self, action: Action) -> list[PipeInstruction]:
        where = self._where(action)
        instructions: list[PipeInstruction] = []
        if not self.is_last_stage:
            instructions.append(RecvGrad(**where))
        instructions.append(BackwardPass(**where))
        if not self.is_first_stage:
            instructions.append(SendGrad(**where))
        return instructions

    def _where(self, action: Action) -> dict[str, int]:
        return {"buffer_id": self._buffer_idx(action.micro_batch), "micro_batch": action.micro_batch}


class PlannedSchedule(LoweredSchedule):
    """Training: forwards and backwards in the order of a named plan, then the optimizer step.

    Args:
        micro_batches: M.
        stages: K.
        stage_id: k, 0 .. K-1.
        name: "1f1b", "gpipe" or "advance_forward".
        advance: a, forwards further ahead of the next stage than in 1F1B; only with "advance_forward".

    Raises:
        ValueError: an argument is out of range.

    """

    def __init__(self, micro_batches: int, stages: int, stage_id: int, *, name: str, advance: int = 0) -> None:
        plans = _checked_plans(name, num_stages=stages, num_micro_batches=micro_batches, advance=advance)
        super().__init__(micro_batches, stages, stage_id, plans=plans)

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield one list of instructions per computation, and at the end that of the optimizer step."""
        yield from super().steps()
        yield [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]


class OneForwardOneBackwardSchedule(PlannedSchedule):
    """1F1B: the least memory, K - k micro-batches."""

    def __init__(self, micro_batches: int, stages: int, stage_id: int) -> None:
        super().__init__(micro_batches, stages, stage_id, name="1f1b")


class GPipeSchedule(PlannedSchedule):
    """All forwards, then all backwards: the least waiting for messages, M stored micro-batches."""

    def __init__(self, micro_batches: int, stages: int, stage_id: int) -> None:
        super().__init__(micro_batches, stages, stage_id, name="gpipe")


class AdvanceForwardSchedule(PlannedSchedule):
    """1F1B in which every stage runs `advance` forwards further ahead of the next stage (paper, section 4)."""

    def __init__(self, micro_batches: int, stages: int, stage_id: int, *, advance: int) -> None:
        super().__init__(micro_batches, stages, stage_id, name="advance_forward", advance=advance)


class ForwardOnlySchedule(LoweredSchedule):
    """Evaluation: all forwards in order, one slot, no optimizer step."""

    def __init__(self, micro_batches: int, stages: int, stage_id: int) -> None:
        plans = (forward_only_plan(num_micro_batches=micro_batches),) * stages
        super().__init__(micro_batches, stages, stage_id, plans=plans)

    def num_pipe_buffers(self) -> int:
        """1: a micro-batch is done with after its forward."""
        return 1


def make_schedule(config: ScheduleConfig, *, num_micro_batches: int, num_stages: int, stage_id: int) -> PlannedSchedule:
    """The schedule that the configuration asks for; checked by the simulator, once for all stages and pipelines.

    Args:
        config: the "schedule" section.
        num_micro_batches: M.
        num_stages: K.
        stage_id: k, 0 .. K-1.

    Raises:
        ValueError: a number is out of range.

    """
    advance = 0 if config.advance == "auto" else config.advance  # where it starts
    return PlannedSchedule(num_micro_batches, num_stages, stage_id, name=config.name, advance=advance)


@lru_cache(maxsize=256)
def _checked_plans(name: str, *, num_stages: int, num_micro_batches: int, advance: int) -> tuple[Plan, ...]:
    """Plans of all stages that are valid, do not deadlock, and whose slots do not collide."""
    plans = plan_all_stages(name, num_stages=num_stages, num_micro_batches=num_micro_batches, advance=advance)
    validate(plans)
    simulate(plans, num_iterations=1)
    for stage_id, actions in enumerate(plans):
        _check_slots(actions, stage_id=stage_id, plans=plans)
    return plans


def _check_slots(actions: Plan, *, stage_id: int, plans: tuple[Plan, ...]) -> None:
    num_slots = peak_stored(actions)
    held: dict[int, Action] = {}
    for action in actions:
        slot = action.micro_batch % num_slots
        if action.kind == "B":
            del held[slot]
        elif slot in held:
            raise ScheduleError(f"stage {stage_id}: {action} would overwrite {held[slot]} in slot {slot}\n{timetable(plans)}")
        else:
            held[slot] = action
