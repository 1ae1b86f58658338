"""What has arrived at this rank, sorted for those who wait for it.

The transport's threads put events into one inbox; the main thread drains it here, so nothing below needs a lock. A rank that
fails tells all others (`abort`); they raise `RemoteError` at their next look into the mailbox, wherever in the engine they
wait.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Hashable
from typing import Any, cast

from torch import Tensor

from avgpipe_ds.errors import PeerLost, RemoteError
from avgpipe_ds.transport.base import LostPeer, Transport
from avgpipe_ds.transport.message import Message

__all__ = ["Mailbox"]

PATIENCE_S = 10.0
"""How long a rank that failed waits until the others know; those in user code do not look."""

_ABORT = "abort"
_ABORT_SEEN = "abort-seen"


class Mailbox:
    """Channels of messages, on top of a transport. Used by the main thread only.

    Args:
        transport: where messages come from.
        name_of: how to name a rank to a user, such as "rank 3 (stage 1)".

    Attributes:
        transport, name_of: as given.
        calls: how many calls that all ranks take part in this one has begun; the engine counts.
        generation: part of every channel; `forget` starts a new one.

    """

    def __init__(self, transport: Transport, name_of: Callable[[int], str]) -> None:
        self.transport = transport
        self.calls = 0
        self.generation = 0
        self.name_of = name_of
        self._channels: defaultdict[tuple[int, Hashable], deque[Message]] = defaultdict(deque)
        self._gone: dict[int, LostPeer] = {}
        self._abort: Message | None = None
        self._abort_seen: set[int] = set()

    def send(
        self,
        to: int,
        channel: Hashable,
        payload: Any = None,
        tensors: tuple[Tensor, ...] = (),
        requires_grad: tuple[bool, ...] = (),
    ) -> None:
        """Send to a channel of rank `to`; returns at once. The tensors must not change afterwards."""
        self.transport.send(to, Message((self.generation, channel), payload, tensors, requires_grad))

    def has(self, channel: Hashable) -> bool:
        """Whether a message waits in a channel."""
        return (self.generation, channel) in self._channels

    def take(self, channel: Hashable) -> Message:
        """The oldest message of a channel that `has` one."""
        key = (self.generation, channel)
        queue = self._channels[key]
        message = queue.popleft()
        if not queue:
            del self._channels[key]
        return message

    def drain(self) -> bool:
        """Sort what has arrived; returns whether there was anything.

        Raises:
            RemoteError: another rank failed.
            PeerLost: another rank died, or left before the present call.

        """
        event, any_event = self.transport.inbox.poll(), False
        while event is not None:
            self._sort(event)
            any_event, event = True, self.transport.inbox.poll()
        self._raise_failures()
        return any_event

    def wait(self) -> None:
        """Block until something arrives, and sort it. The one place where a rank waits. Raises as `drain`."""
        event = self.transport.inbox.wait()
        if event is not None:
            self._sort(event)
        self.drain()

    def forget(self) -> None:
        """Give up all work in flight: messages that were sent before all ranks called this are dropped, those sent after it are
        kept.
        """
        self.generation += 1
        for key in [key for key in self._channels if key[0] < self.generation]:
            del self._channels[key]

    def close(self, reason: str) -> None:
        """Leave in good order; see `Transport.close`."""
        self.transport.close(self.calls, reason)
        self._channels.clear()

    def cause_of(self, error: BaseException) -> BaseException:
        """What is behind an error: inside a collective, the failure of another rank is seen as a broken connection only."""
        if not self.transport.broke(error):
            return error
        deadline = time.monotonic() + PATIENCE_S
        try:
            while True:
                self.drain()
                event = self.transport.inbox.wait(max(0.0, deadline - time.monotonic()))
                if event is None:
                    return error
                self._sort(event)
        except (PeerLost, RemoteError) as cause:
            return cause

    def abort(self, error: BaseException) -> None:
        """Tell all ranks that this one failed and wait, briefly, until they know.

        A launcher ends the whole job as soon as one process exits, so the others need a moment to say what happened.
        """
        text = f"{type(error).__name__}: {error}"
        others = {rank for rank in range(self.transport.world_size) if rank != self.transport.rank}
        already_told = isinstance(error, RemoteError)
        for rank in others:
            self.transport.send(rank, Message(_ABORT_SEEN if already_told else _ABORT, None if already_told else text))
        if already_told:
            return
        deadline = time.monotonic() + PATIENCE_S
        while others - self._abort_seen - set(self._gone) and (left_s := deadline - time.monotonic()) > 0:
            event = self.transport.inbox.wait(left_s)
            if event is not None:
                self._sort(event)

    def _sort(self, event: Message | LostPeer | Callable[[], None]) -> None:
        if isinstance(event, LostPeer):
            self._gone.setdefault(event.rank, event)
        elif isinstance(event, Message):
            if event.channel == _ABORT:
                self._abort = self._abort or event
                self._abort_seen.add(event.source)
            elif event.channel == _ABORT_SEEN:
                self._abort_seen.add(event.source)
            else:
                self._deliver(event)
        else:
            event()

    def _deliver(self, message: Message) -> None:
        generation, channel = cast(tuple[int, Hashable], message.channel)
        if generation >= self.generation:
            self._channels[generation, channel].append(message)

    def _raise_failures(self) -> None:
        if self._abort is not None:
            raise RemoteError(self._abort.source, f"{self._abort.payload} (told by {self.name_of(self._abort.source)})")
        for peer in self._gone.values():
            # Who left in good order after as many calls as this rank has begun has sent everything that this rank still needs.
            if peer.calls < self.calls:
                raise PeerLost(f"{self.name_of(peer.rank)} is gone: {peer.reason}")
