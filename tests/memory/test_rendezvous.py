"""Meeting points that block nobody."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest

from avgpipe_ds.execution.mailbox import Mailbox
from avgpipe_ds.execution.rendezvous import Rendezvous
from avgpipe_ds.transport.memory import memory_world


def world(size: int) -> list[tuple[Mailbox, Rendezvous]]:
    boxes = [Mailbox(transport, str) for transport in memory_world(size)]
    return [(box, Rendezvous(box)) for box in boxes]


def test_complete_once_all_others_have_announced() -> None:
    (box, here), (_, second), (_, third) = world(3)
    ranks = (0, 1, 2)
    second.announce("step", ranks, "two")
    box.drain()
    assert not here.complete("step", ranks) and here.complete("step", (0, 1))
    third.announce("step", ranks, "three")
    box.drain()
    assert here.complete("step", ranks)
    assert here.collect("step", ranks, "one") == ["one", "two", "three"]
    assert not here.complete("step", ranks)  # forgotten


def test_keys_do_not_mix_and_may_come_in_any_order() -> None:
    (box, here), (_, there) = world(2)
    for key in ((1, 0), (0, 1), (0, 0)):
        there.announce(key, (0, 1), key)
    box.drain()
    for key in ((0, 0), (0, 1), (1, 0)):
        assert here.collect(key, (0, 1))[1] == key


def test_alone_is_complete() -> None:
    ((_, here),) = world(1)
    assert here.complete("step", (0,)) and here.gather("step", (0,), 5) == [5]


def test_gather_of_many_rounds_with_delays() -> None:
    ranks = (0, 1, 2)
    results: dict[int, list[list[tuple[int, int]]]] = {}

    def work(rank: int, meet: Rendezvous) -> None:
        delays = random.Random()
        results[rank] = []
        for turn in range(20):
            time.sleep(delays.random() * 0.003)
            results[rank].append(meet.gather("round", ranks, (rank, turn)))

    threads = [threading.Thread(target=work, args=(rank, meet)) for rank, (_, meet) in enumerate(world(3))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    expected = [[(rank, turn) for rank in ranks] for turn in range(20)]
    assert results == {rank: expected for rank in ranks}


def finish(steps: Any) -> Any:
    """The result of a generator that has nothing left to wait for."""
    with pytest.raises(StopIteration) as end:
        next(steps)
    return end.value.value


def test_gathering_waits_for_all_along_a_tree() -> None:
    worlds, ranks, sent = world(5), (1, 3, 2, 0), []
    for box, _ in worlds:
        send = box.transport.send
        box.transport.send = lambda to, message, box=box, send=send: (sent.append((box.transport.rank, to)), send(to, message))
    steps = {rank: worlds[rank][1].gathering("norm", ranks, 10 * rank) for rank in ranks}
    come = {rank: next(steps[rank]) for rank in ranks}
    assert come[0]() and come[2]() and not come[3]() and not come[1]()
    come[0] = next(steps[0])  # 0 has told 3
    worlds[3][0].drain()
    assert come[3]()
    come[3] = next(steps[3])  # 3 has told 1, which still waits for 2
    worlds[1][0].drain()
    assert not come[1]()
    come[2] = next(steps[2])
    worlds[1][0].drain()
    assert come[1]()
    results = [finish(steps[1])]
    for rank in (2, 3, 0):
        worlds[rank][0].drain()
        assert come[rank]()
        results.append(finish(steps[rank]))
    assert results == [[10, 30, 20, 0]] * 4
    assert sent == [(0, 3), (3, 1), (2, 1), (1, 3), (1, 2), (3, 0)]
