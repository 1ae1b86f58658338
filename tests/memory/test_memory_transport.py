"""The promises of a transport, with ranks as threads and delays between all they do."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import torch

from avgpipe_ds.execution.mailbox import Mailbox
from avgpipe_ds.transport.base import LostPeer
from avgpipe_ds.transport.memory import MemoryTransport, memory_world
from avgpipe_ds.transport.message import Message, decode_header, encode_header


def in_threads(size: int, work: Callable[[MemoryTransport, random.Random], None]) -> None:
    """Run `work` on every rank; a rank that raises or hangs fails the test."""
    errors: list[BaseException] = []

    def guarded(transport: MemoryTransport) -> None:
        try:
            work(transport, random.Random())
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(transport,)) for transport in memory_world(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
        assert not thread.is_alive()
    assert not errors, errors


def test_messages_of_one_sender_keep_their_order() -> None:
    def work(transport: MemoryTransport, delays: random.Random) -> None:
        box = Mailbox(transport, str)
        others = [rank for rank in range(3) if rank != transport.rank]
        for number in range(30):
            time.sleep(delays.random() * 0.001)
            for rank in others:
                box.send(rank, ("from", transport.rank), number, (torch.full((number % 4,), float(number)),))
        for rank in others:
            for number in range(30):
                while not box.has(("from", rank)):
                    box.wait()
                message = box.take(("from", rank))
                assert message.payload == number and message.tensors[0].tolist() == [number] * (number % 4)

    in_threads(3, work)


def test_all_reductions_of_different_lanes_in_any_order() -> None:
    def work(transport: MemoryTransport, delays: random.Random) -> None:
        lanes = list(range(6))
        delays.shuffle(lanes)
        sums = {lane: torch.tensor([float(transport.rank + 10 * lane)]) for lane in lanes}
        done: list[int] = []
        for lane in lanes:
            time.sleep(delays.random() * 0.002)
            transport.all_reduce([sums[lane]], (0, 1, 2), lane, lambda lane=lane: done.append(lane))  # type: ignore[misc]
        while len(done) < len(lanes):
            event = transport.inbox.wait(10)
            assert callable(event)
            event()
        assert all(sums[lane].item() == 3 + 30 * lane for lane in lanes)

    in_threads(3, work)


def test_close_is_seen_by_the_peers() -> None:
    first, second = memory_world(2)
    first.close(4, "it ended")
    assert second.inbox.poll() == LostPeer(0, "it ended", 4)


def test_headers_carry_any_shape_and_dtype() -> None:
    tensors = (torch.zeros(2, 0, dtype=torch.int64), torch.zeros((), dtype=torch.bool), torch.zeros(3, 1, dtype=torch.bfloat16))
    message = Message(("activation", 2), (7, None, {"loss": 0.5}), tensors, (False, False, True))
    channel, payload, specs = decode_header(encode_header(message.channel, message.payload, message.specs()))
    assert (channel, payload) == (message.channel, message.payload)
    assert [(s.shape, s.dtype, s.requires_grad) for s in specs] == [
        ((2, 0), torch.int64, False),
        ((), torch.bool, False),
        ((3, 1), torch.bfloat16, True),
    ]
    assert all(spec.allocate(torch.device("cpu")).shape == spec.shape for spec in specs)
