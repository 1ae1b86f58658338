"""Ranks as threads of one process. For tests: no processes, no sockets, and delays that a test can inject."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from avgpipe_ds.transport.base import Inbox, LostPeer, Transport
from avgpipe_ds.transport.message import Message

__all__ = ["MemoryTransport", "memory_world"]


class _World:
    """What the ranks share: everybody's inbox, and the all-reductions that still wait for someone."""

    def __init__(self, world_size: int) -> None:
        self.inboxes = [Inbox() for _ in range(world_size)]
        self.lock = threading.Lock()
        self.counters: dict[tuple[int, tuple[int, ...], int], int] = {}
        self.pending: dict[tuple[tuple[int, ...], int, int], dict[int, tuple[list[Tensor], Callable[[], None]]]] = {}


class MemoryTransport(Transport):
    """Tensors are cloned on sending, so ranks share no storage, as over a network."""

    def __init__(self, world: _World, rank: int) -> None:
        self._world = world
        self.rank = rank
        self.world_size = len(world.inboxes)
        self.inbox = world.inboxes[rank]

    def send(self, to: int, message: Message) -> None:
        """See `Transport.send`."""
        tensors = tuple(t.detach().clone() for t in message.tensors)
        self._world.inboxes[to].put(replace(message, tensors=tensors, source=self.rank))

    def all_reduce(self, tensors: list[Tensor], ranks: tuple[int, ...], lane: int, done: Callable[[], None]) -> None:
        """See `Transport.all_reduce`. Summed in rank order."""
        world = self._world
        with world.lock:
            count = world.counters.get((self.rank, ranks, lane), 0)
            world.counters[self.rank, ranks, lane] = count + 1
            arrived = world.pending.setdefault((ranks, lane, count), {})
            arrived[self.rank] = (tensors, done)
            if len(arrived) < len(ranks):
                return
            del world.pending[ranks, lane, count]
        with torch.no_grad():
            for parts in zip(*(arrived[rank][0] for rank in ranks), strict=True):
                total = torch.stack(list(parts)).sum(0)
                for part in parts:
                    part.copy_(total)
        for rank in ranks:
            world.inboxes[rank].put(arrived[rank][1])

    def prepare_groups(self, groups: list[tuple[int, ...]], num_lanes: int) -> None:
        """Nothing to set up."""

    def close(self, calls: int = 0, reason: str = "it ended") -> None:
        """Peers that wait for this rank see that it left."""
        for rank, inbox in enumerate(self._world.inboxes):
            if rank != self.rank:
                inbox.put(LostPeer(self.rank, reason, calls))


def memory_world(world_size: int) -> list[MemoryTransport]:
    """The transports of `world_size` ranks, to be used by one thread each."""
    world = _World(world_size)
    return [MemoryTransport(world, rank) for rank in range(world_size)]
