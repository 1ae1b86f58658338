"""The interface that executor and pipelines see; implementations differ only in how bytes move.

The promises that everything above relies on:

- `send` returns at once, whatever the receiver does;
- messages from one rank to another arrive in the order they were sent;
- every arrival, loss of a peer and finished collective wakes the one thread that waits in `Inbox.wait`.
"""

from __future__ import annotations

import queue
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from avgpipe_ds.transport.message import Message

__all__ = ["Inbox", "LostPeer", "Transport"]


@dataclass(frozen=True, slots=True)
class LostPeer:
    """A peer can't be reached any more.

    Attributes:
        rank: which one.
        reason: what is known about it.
        calls: how many collective calls it had taken part in when it left in good order; -1 if it did not.

    """

    rank: int
    reason: str
    calls: int = -1


Event = Message | LostPeer | Callable[[], None]
"""What helper threads hand to the main thread. A callable is run there: completions of collectives."""


class Inbox:
    """Where helper threads leave events for the main thread; the only place where the main thread ever blocks."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def put(self, event: Event) -> None:
        """Called from any thread."""
        self._events.put(event)

    def poll(self) -> Event | None:
        """The next event, or None when there is none."""
        try:
            return self._events.get_nowait()
        except queue.Empty:
            return None

    def wait(self, timeout_s: float | None = None) -> Event | None:
        """The next event; blocks until there is one, or returns None after `timeout_s` seconds."""
        try:
            return self._events.get(timeout=timeout_s)
        except queue.Empty:
            return None


class Transport(ABC):
    """Messages between the ranks of one job, and all-reductions that do not block."""

    rank: int
    world_size: int
    inbox: Inbox

    @abstractmethod
    def send(self, to: int, message: Message) -> None:
        """Send to rank `to`; returns at once. The tensors must not change afterwards."""

    @abstractmethod
    def all_reduce(self, tensors: list[Tensor], ranks: tuple[int, ...], lane: int, done: Callable[[], None]) -> None:
        """Sum each tensor over `ranks`, in place; returns at once, and `done` is put into the inbox when the sums are there.

        Every rank of `ranks` must call it. Calls of one (ranks, lane) must come in the same order on all of them; calls of
        different lanes may come in any order, which is why each pipeline has its own lane.
        """

    @abstractmethod
    def prepare_groups(self, groups: list[tuple[int, ...]], num_lanes: int) -> None:
        """Set up `all_reduce` for these groups of ranks. Collective: every rank of the job passes the same list."""

    def broke(self, error: BaseException) -> bool:
        """Whether an error in a collective means that a connection broke: somebody else is its cause."""
        return False

    @abstractmethod
    def close(self, calls: int = 0, reason: str = "it ended") -> None:
        """Say goodbye to the peers and release threads and connections; peers see a `LostPeer` with this reason and number of
        calls.
        """
