"""Plans as DeepSpeed instructions, against DeepSpeed's own schedule and lists written by hand."""

from __future__ import annotations

import pytest
from deepspeed.runtime.pipe.schedule import BackwardPass, ForwardPass, PipeSchedule, TrainSchedule

from avgpipe_ds.config import ScheduleConfig
from avgpipe_ds.errors import ScheduleError
from avgpipe_ds.schedules.actions import Action
from avgpipe_ds.schedules.deepspeed_schedules import (
    AdvanceForwardPass,
    AdvanceForwardSchedule,
    ForwardOnlySchedule,
    GPipeSchedule,
    OneForwardOneBackwardSchedule,
    PlannedSchedule,
    _check_slots,
    make_schedule,
)

SHORT = {
    "RecvActivation": "recv",
    "LoadMicroBatch": "load",
    "ForwardPass": "F",
    "AdvanceForwardPass": "A",
    "SendActivation": "send",
    "RecvGrad": "recv'",
    "BackwardPass": "B",
    "SendGrad": "send'",
}
OPTIMIZER = "ReduceTiedGrads ReduceGrads OptimizerStep"


def text(schedule: PipeSchedule) -> list[str]:
    """One line per step; `F2@0` is the forward of micro-batch 2 in buffer 0."""

    def word(instruction) -> str:
        if instruction.name not in SHORT:
            return instruction.name
        return f"{SHORT[instruction.name]}{instruction.micro_batch}@{instruction.buffer_id}"

    return [" ".join(map(word, step)) for step in schedule.steps()]


def test_advance_forward_on_the_first_stage():
    assert text(AdvanceForwardSchedule(4, 2, 0, advance=1)) == [
        "load0@0 F0@0 send0@0",
        "load1@1 F1@1 send1@1",
        "load2@2 A2@2 send2@2",
        "recv'0@0 B0@0",
        "load3@0 F3@0 send3@0",
        "recv'1@1 B1@1",
        "recv'2@2 B2@2",
        "recv'3@0 B3@0",
        OPTIMIZER,
    ]


def test_1f1b_in_the_middle_and_on_the_last_stage():
    assert text(OneForwardOneBackwardSchedule(2, 3, 1)) == [
        "recv0@0 F0@0 send0@0",
        "recv1@1 F1@1 send1@1",
        "recv'0@0 B0@0 send'0@0",
        "recv'1@1 B1@1 send'1@1",
        OPTIMIZER,
    ]
    assert text(OneForwardOneBackwardSchedule(2, 3, 2)) == [
        "recv0@0 load0@0 F0@0",
        "B0@0 send'0@0",
        "recv1@0 load1@0 F1@0",
        "B1@0 send'1@0",
        OPTIMIZER,
    ]


def test_gpipe_and_a_single_stage():
    assert text(GPipeSchedule(2, 1, 0)) == ["load0@0 F0@0", "load1@1 A1@1", "B0@0", "B1@1", OPTIMIZER]


def test_forward_only():
    assert text(ForwardOnlySchedule(2, 3, 0)) == ["load0@0 F0@0 send0@0", "load1@0 F1@0 send1@0"]
    assert text(ForwardOnlySchedule(2, 3, 1)) == ["recv0@0 F0@0 send0@0", "recv1@0 F1@0 send1@0"]
    assert text(ForwardOnlySchedule(2, 3, 2)) == ["recv0@0 load0@0 F0@0", "recv1@0 load1@0 F1@0"]
    assert ForwardOnlySchedule(2, 3, 0).num_pipe_buffers() == 1


@pytest.mark.parametrize("K, M", [(1, 1), (1, 4), (2, 1), (2, 4), (3, 2), (3, 7), (4, 2), (4, 4), (4, 8), (5, 6), (8, 8)])
def test_same_order_as_deepspeed(K, M):
    """At advance 0 a stage computes what DeepSpeed's TrainSchedule computes, in its order."""

    def counted(schedule: PipeSchedule) -> list[str]:
        count = {"F": 0, "B": 0}
        order = []
        for step in schedule.steps():
            for instruction in step:
                if isinstance(instruction, ForwardPass | BackwardPass):
                    kind = "F" if isinstance(instruction, ForwardPass) else "B"
                    order.append(f"{kind}{count[kind]}")
                    count[kind] += 1
        return order

    for k in range(K):
        ours = OneForwardOneBackwardSchedule(M, K, k)
        assert counted(ours) == counted(TrainSchedule(M, K, k))
        assert [str(action) for action in ours.plan] == counted(ours), "micro-batches in order"


@pytest.mark.parametrize("K, M, a", [(1, 3, 2), (2, 8, 0), (2, 8, 1), (3, 8, 2), (4, 8, 3), (4, 2, 1), (4, 8, 8)])
def test_a_buffer_holds_one_micro_batch(K, M, a):
    for k in range(K):
        schedule = AdvanceForwardSchedule(M, K, k, advance=a)
        assert schedule.num_pipe_buffers() == min(M, (K - 1 - k) * (1 + a) + 1)
        held: dict[int, int] = {}
        for instruction in (instruction for step in schedule.steps() for instruction in step):
            if isinstance(instruction, ForwardPass):
                assert 0 <= instruction.buffer_id < schedule.num_pipe_buffers()
                assert instruction.buffer_id not in held
                held[instruction.buffer_id] = instruction.micro_batch
            elif isinstance(instruction, BackwardPass):
                assert held.pop(instruction.buffer_id) == instruction.micro_batch
        assert not held


def test_colliding_slots_are_found():
    """Plans in order cannot collide; one out of order, which the validator refuses as well, does."""
    plan = tuple(map(Action.parse, "F0 F1 B1 F2 B0 B2".split()))
    with pytest.raises(ScheduleError, match="F2 would overwrite F0 in slot 0"):
        _check_slots(plan, stage_id=0, plans=(plan,))


def test_every_send_has_its_receive():
    K, M = 3, 5
    for a in (0, 1, 5):
        instructions = [[i for step in AdvanceForwardSchedule(M, K, k, advance=a).steps() for i in step] for k in range(K)]

        def sequence(k, name, instructions=instructions):
            return [i.micro_batch for i in instructions[k] if i.name == name]

        for k in range(K - 1):
            assert sequence(k, "SendActivation") == sequence(k + 1, "RecvActivation") == list(range(M))
            assert sequence(k + 1, "SendGrad") == sequence(k, "RecvGrad") == list(range(M))
        assert not sequence(0, "RecvActivation") + sequence(0, "SendGrad")
        assert not sequence(K - 1, "SendActivation") + sequence(K - 1, "RecvGrad")


@pytest.mark.parametrize(
    "config, same_as",
    [
        (ScheduleConfig(), OneForwardOneBackwardSchedule(4, 2, 0)),
        (ScheduleConfig(name="gpipe"), GPipeSchedule(4, 2, 0)),
        (ScheduleConfig(name="advance_forward", advance=1), AdvanceForwardSchedule(4, 2, 0, advance=1)),
    ],
)
def test_make_schedule(config, same_as):
    schedule = make_schedule(config, num_micro_batches=4, num_stages=2, stage_id=0)
    assert isinstance(schedule, PlannedSchedule) and isinstance(schedule, PipeSchedule)
    assert text(schedule) == text(same_as)


def test_it_can_be_iterated_like_any_deepspeed_schedule():
    schedule = OneForwardOneBackwardSchedule(3, 2, 0)
    assert len(list(schedule)) == len(list(schedule)) == 7
    assert issubclass(AdvanceForwardPass, ForwardPass)


@pytest.mark.parametrize("build", [OneForwardOneBackwardSchedule, ForwardOnlySchedule])
@pytest.mark.parametrize("arguments, message", [((4, 2, 2), "got 2"), ((4, 2, -1), "got -1"), ((0, 2, 0), "got 0")])
def test_bad_arguments(build, arguments, message):
    with pytest.raises(ValueError, match=message):
        build(*arguments)
