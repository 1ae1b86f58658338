"""Meeting points that block nobody."""

from __future__ import annotations

import random
import threading
import time

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


def test_gathering_waits_for_all_and_needs_two_messages_per_rank() -> None:
    worlds, ranks = world(4), (1, 3, 2)
    sent: list[tuple[int, int]] = []
    for box, _ in worlds:
        send = box.transport.send
        box.transport.send = lambda to, message, box=box, send=send: (sent.append((box.transport.rank, to)), send(to, message))[1]  # type: ignore[method-assign]
    steps = {rank: worlds[rank][1].gathering("norm", ranks, 10 * rank) for rank in ranks}
    conditions = {rank: next(steps[rank]) for rank in (1, 3)}
    for rank in (1, 3):
        worlds[rank][0].drain()
        assert not conditions[rank]()
    conditions[2] = next(steps[2])
    results = {}
    for rank in ranks:  # the first adds up and tells the others
        worlds[rank][0].drain()
        assert conditions[rank]()
        try:
            next(steps[rank])
        except StopIteration as end:
            results[rank] = end.value
    assert results == dict.fromkeys(ranks, [10, 30, 20])
    assert sorted(sent) == [(1, 2), (1, 3), (2, 1), (3, 1)]
