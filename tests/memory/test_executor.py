"""The executor with streams written by hand."""

from __future__ import annotations

import threading
import time

import pytest

from avgpipe_ds.execution.executor import Executor, Stream, Wait
from avgpipe_ds.execution.mailbox import Mailbox
from avgpipe_ds.tracing.recorder import Recorder
from avgpipe_ds.transport.memory import memory_world


def mailboxes(world_size: int = 1) -> list[Mailbox]:
    return [Mailbox(transport, lambda rank: f"rank {rank}") for transport in memory_world(world_size)]


def counting(log: list[str], name: str, steps: int, priority: int) -> Stream:
    """Logs `steps` steps; each is always ready."""
    for step in range(steps):
        yield Wait(lambda: True, (priority,), "nothing")
        log.append(f"{name}{step}")


def test_best_priority_goes_first_and_ties_in_order_of_adding() -> None:
    log: list[str] = []
    executor = Executor(mailboxes()[0], Recorder())
    for name, priority in (("a", 1), ("b", 0), ("c", 0)):
        executor.add(counting(log, name, 2, priority))
    executor.run(lambda: executor.idle)
    assert log == ["b0", "b1", "c0", "c1", "a0", "a1"]


def test_no_stream_waits_while_another_can_go_on() -> None:
    log: list[str] = []
    receiver, sender = mailboxes(2)
    executor = Executor(receiver, Recorder())

    def waiting() -> Stream:
        yield Wait(lambda: receiver.has("data"), (0,), "data")
        log.append(str(receiver.take("data").payload))

    def working() -> Stream:
        for step in range(4):
            yield Wait(lambda: True, (1,), "nothing")
            log.append(f"step {step}")
            if step == 1:
                sender.send(0, "data", "arrived")

    executor.add(waiting())
    executor.add(working())
    executor.run(lambda: executor.idle)
    assert log == ["step 0", "step 1", "arrived", "step 2", "step 3"]


def test_blocks_until_a_message_comes() -> None:
    receiver, sender = mailboxes(2)
    executor = Executor(receiver, Recorder())
    got: list[int] = []

    def waiting() -> Stream:
        for number in range(3):
            yield Wait(lambda: receiver.has("data"), (0,), "data")
            got.append(receiver.take("data").payload)
            assert got[-1] == number

    def send_slowly() -> None:
        for number in range(3):
            time.sleep(0.02)
            sender.send(0, "data", number)

    executor.add(waiting())
    thread = threading.Thread(target=send_slowly)
    thread.start()
    executor.run(lambda: executor.idle)
    thread.join()
    assert got == [0, 1, 2]


@pytest.mark.timeout(20)
def test_an_arrival_that_ends_the_run_is_not_overlooked() -> None:
    receiver, sender = mailboxes(2)
    executor = Executor(receiver, Recorder())

    def waiting() -> Stream:
        yield Wait(lambda: receiver.has("data"), (0,), "data")

    executor.add(waiting())
    asked = 0

    def done() -> bool:
        nonlocal asked
        asked += 1
        ended = receiver.has("end")
        if asked == 1:
            sender.send(0, "end")  # arrives right after this rank has looked
        return ended

    executor.run(done)
    assert asked == 2


def test_streams_keep_their_place_between_runs() -> None:
    log: list[str] = []
    executor = Executor(mailboxes()[0], Recorder())
    executor.add(counting(log, "a", 5, 0))
    executor.run(lambda: len(log) == 2)
    assert log == ["a0", "a1"] and not executor.idle
    executor.run(lambda: executor.idle)
    assert log == ["a0", "a1", "a2", "a3", "a4"]


def test_nothing_runs_when_done_already() -> None:
    log: list[str] = []
    executor = Executor(mailboxes()[0], Recorder())
    executor.add(counting(log, "a", 1, 0))
    executor.run(lambda: True)
    assert log == []


def test_an_exception_of_a_stream_passes_through() -> None:
    executor = Executor(mailboxes()[0], Recorder())

    def failing() -> Stream:
        yield Wait(lambda: True, (0,), "nothing")
        raise ArithmeticError("no")

    executor.add(failing())
    with pytest.raises(ArithmeticError, match="no"):
        executor.run(lambda: executor.idle)


def test_clear_closes_streams() -> None:
    executor = Executor(mailboxes()[0], Recorder())
    closed: list[bool] = []

    def stream() -> Stream:
        try:
            while True:
                yield Wait(lambda: True, (0,), "nothing")
        finally:
            closed.append(True)

    executor.add(stream())
    executor.clear()
    assert executor.idle and closed == [True]
