"""Messages over gloo, for CPU tensors.

gloo completes a point-to-point operation only for somebody who waits for it, so threads do the waiting: one per peer receives,
one reaps finished sends (now and then: waking it for every send would cost as much as the send), and every all-reduction has one
for as long as it takes. They spend their time inside gloo without the interpreter lock. A receiver thread takes every message as
soon as it comes; how much can pile up is bounded by the schedules, which never run ahead of the optimizer.

A message is one frame, header and tensors together, if it is small. Larger tensors follow the frame by themselves, uncopied.
They travel under a tag that follows from their shapes and dtypes. So a receive for what came last can be posted before its
header is there, which saves the round trip between the two; should something else come, it goes under another tag, and the
receive keeps for when those shapes return. gloo can't take a posted receive back, hence a limit on how many shapes have one.

A goodbye is the last message of a rank to a peer. A rank says it when it leaves, and its receiver threads say it in answer to
the peer's, whatever the main thread is doing; each ends a receiver. So leaving takes a round trip: what was sent has arrived,
nothing is left blocked inside gloo when the interpreter shuts down (such a thread would abort the process), and a peer that
waits for this rank elsewhere, in a collective of its own, sees the connection close. One that breaks without a goodbye is a lost
peer.
"""

from __future__ import annotations

import datetime
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from avgpipe_ds.transport.base import Inbox, LostPeer, Transport
from avgpipe_ds.transport.message import Message, TensorSpec, decode_header, encode_header

__all__ = ["GlooTransport"]

_LENGTH_BYTES = 4
_FRAME_BYTES = 1 << 16  # of the buffer that a frame is received in; gloo sends only what is used of it
_FRAME_TAG = 0
_REAP_EVERY_S = 0.02
_MAX_POSTED_AHEAD = 8  # kinds of messages per peer; with lengths that always vary, more would be memory for nothing
_GOODBYE = "goodbye"
_FOREVER = datetime.timedelta(days=30)  # a peer may evaluate or save for hours; a dead one breaks its connection at once


class GlooTransport(Transport):
    """Point-to-point messages and all-reductions on process groups of its own.

    Collective: every rank builds it at the same point.
    """

    _reduce_backend = "gloo"

    def __init__(self, device: torch.device) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.device = device
        self.inbox = Inbox()
        self._closing = False
        self._sending = threading.Lock()  # the parts of a message must follow each other
        self._parted: set[int] = set()
        self._reduce_groups: dict[tuple[tuple[int, ...], int], Any] = {}
        self._reducing: list[tuple[tuple[int, ...], threading.Thread]] = []
        self._posted: dict[tuple[int, int], tuple[list[Tensor], list[Any]]] = {}  # by peer and tag
        self._group = dist.new_group(backend="gloo", timeout=_FOREVER)
        self._sent: deque[tuple[list[Any], Any]] = deque()
        self._all_said = threading.Event()
        self._reaper = threading.Thread(target=self._reap, name="avgpipe-send", daemon=True)
        self._reaper.start()
        self._receivers = {
            peer: threading.Thread(target=self._receive_from, args=(peer,), name=f"avgpipe-receive-{peer}", daemon=True)
            for peer in range(self.world_size)
            if peer != self.rank
        }
        for thread in self._receivers.values():
            thread.start()

    def send(self, to: int, message: Message) -> None:
        """See `Transport.send`. Dropped when the goodbye has been said: that peer has left."""
        with self._sending:
            if to not in self._parted:
                self._send(to, message)

    def _send(self, to: int, message: Message) -> None:
        specs = message.specs()
        header = encode_header(message.channel, message.payload, specs)
        inline = self._fits(specs, _LENGTH_BYTES + len(header))
        parts: list[Any] = [len(header).to_bytes(_LENGTH_BYTES, "little"), header]
        if inline:
            parts.extend(_as_bytes(tensor).numpy() for tensor in message.tensors)
        frame = torch.frombuffer(bytearray().join(parts), dtype=torch.uint8)
        try:
            works = [dist.isend(part, to, group=self._group, tag=_FRAME_TAG) for part in torch.split(frame, _FRAME_BYTES)]
            kept = None if inline else self._send_tensors(to, message.tensors, specs, works)
        except RuntimeError as error:
            self._lost(to, error)
            return
        self._sent.append((works, (frame, kept)))

    def _fits(self, specs: tuple[TensorSpec, ...], header_bytes: int) -> bool:
        """Whether the tensors travel in the frame; both ends come to the same answer."""
        return header_bytes + sum(spec.num_bytes for spec in specs) <= _FRAME_BYTES

    def all_reduce(self, tensors: list[Tensor], ranks: tuple[int, ...], lane: int, done: Callable[[], None]) -> None:
        """See `Transport.all_reduce`. Launched here, in program order; only the waiting is left to a thread."""
        group = self._reduce_groups[ranks, lane]
        works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
        thread = threading.Thread(target=self._finish_reduce, args=(works, ranks, done), name="avgpipe-reduce", daemon=True)
        thread.start()
        self._reducing = [*((r, t) for r, t in self._reducing if t.is_alive()), (ranks, thread)]

    def prepare_groups(self, groups: list[tuple[int, ...]], num_lanes: int) -> None:
        """See `Transport.prepare_groups`."""
        for ranks in groups:
            for lane in range(num_lanes):
                self._reduce_groups[ranks, lane] = dist.new_group(list(ranks), backend=self._reduce_backend, timeout=_FOREVER)

    def broke(self, error: BaseException) -> bool:
        """See `Transport.broke`."""
        return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "/gloo/" in str(error))

    def close(self, calls: int = 0, reason: str = "it ended", patience_s: float = 60.0) -> None:
        """See `Transport.close`. Waits for the answers of the peers, `patience_s` seconds at most: one may be frozen."""
        if self._closing:
            return
        self._closing = True
        for peer in self._receivers:
            self._say_goodbye(peer, reason, calls)
        deadline = time.monotonic() + patience_s
        for thread in self._receivers.values():
            thread.join(max(0.0, deadline - time.monotonic()))
        # After a failure an all-reduction may miss a rank for good; it ends when a process that takes part does. So everybody
        # waits for that, and if each waits for another, the first in the group leaves first.
        for ranks, thread in self._reducing:
            thread.join(2.0 * (1 + ranks.index(self.rank)))
        self._all_said.set()
        self._reaper.join(max(0.0, deadline - time.monotonic()))
        self._posted.clear()
        if not any(thread.is_alive() for thread in [*self._receivers.values(), self._reaper]):
            for group in [self._group, *self._reduce_groups.values()]:  # each has threads of its own
                dist.destroy_process_group(group)
            self._reduce_groups.clear()

    def _say_goodbye(self, peer: int, reason: str = "", calls: int = 0) -> None:
        with self._sending:
            if peer not in self._parted:
                self._send(peer, Message(_GOODBYE, (reason, calls)))
                self._parted.add(peer)

    def _send_tensors(self, to: int, tensors: tuple[Tensor, ...], specs: tuple[TensorSpec, ...], works: list[Any]) -> Any:
        """Start to send the tensors, appending to `works`; returns what must stay alive until they are done."""
        flat = [_as_bytes(t) for t in tensors if t.numel()]
        if flat:
            tag = _tag_of(specs)
            works.extend(dist.isend(t, to, group=self._group, tag=tag) for t in flat)
        return flat

    def _receive_tensors(self, peer: int, specs: tuple[TensorSpec, ...]) -> tuple[list[Tensor], list[Any]]:
        """Tensors of these specs, which have been announced, and what to wait for until they are there."""
        tag = _tag_of(specs)
        now = self._posted.pop((peer, tag), None) or self._post(peer, specs, tag)
        if now[1] and sum(known == peer for known, _ in self._posted) < _MAX_POSTED_AHEAD:
            self._posted[peer, tag] = self._post(peer, specs, tag)
        return now

    def _post(self, peer: int, specs: tuple[TensorSpec, ...], tag: int) -> tuple[list[Tensor], list[Any]]:
        tensors = [spec.allocate(self.device) for spec in specs]
        return tensors, [self._receive(_as_bytes(t), peer, tag) for t in tensors if t.numel()]

    def _receive(self, tensor: Tensor, peer: int, tag: int = _FRAME_TAG) -> dist.Work:
        work = dist.irecv(tensor, peer, group=self._group, tag=tag)
        assert work is not None  # only ranks outside the group get None
        return work

    def _receive_from(self, peer: int) -> None:
        frame = torch.empty(_FRAME_BYTES, dtype=torch.uint8)
        memory = memoryview(cast(Any, frame.numpy()))
        try:
            arrival = self._receive(frame, peer)
            while True:
                arrival.wait()
                start = _LENGTH_BYTES + int.from_bytes(memory[:_LENGTH_BYTES], "little")
                header = bytes(memory[_LENGTH_BYTES:start])
                while len(header) < start - _LENGTH_BYTES:
                    rest = torch.empty(min(_FRAME_BYTES, start - _LENGTH_BYTES - len(header)), dtype=torch.uint8)
                    self._receive(rest, peer).wait()
                    header += rest.numpy().tobytes()
                channel, payload, specs = decode_header(header)
                if channel == _GOODBYE:
                    self.inbox.put(LostPeer(peer, *payload))
                    self._say_goodbye(peer)
                    return
                flags = tuple(spec.requires_grad for spec in specs)
                if self._fits(specs, start):
                    self.inbox.put(Message(channel, payload, self._unpack(frame[start:], specs), flags, peer))
                    arrival = self._receive(frame, peer)
                    continue
                tensors, works = self._receive_tensors(peer, specs)
                arrival = self._receive(frame, peer)  # posted now: the next frame need not wait for these tensors
                for work in works:
                    work.wait()
                self.inbox.put(Message(channel, payload, tuple(tensors), flags, peer))
        except Exception as error:  # noqa: BLE001 - whatever breaks a connection, the main thread must hear of it
            self._lost(peer, error)

    def _unpack(self, data: Tensor, specs: tuple[TensorSpec, ...]) -> tuple[Tensor, ...]:
        tensors = [spec.allocate(self.device) for spec in specs]
        for tensor, spec in zip(tensors, specs, strict=True):
            tensor.view(-1).view(torch.uint8).copy_(data[: spec.num_bytes])
            data = data[spec.num_bytes :]
        return tuple(tensors)

    def _reap(self) -> None:
        while self._sent or not self._all_said.is_set():
            self._all_said.wait(_REAP_EVERY_S)
            while self._sent:
                works, _ = self._sent.popleft()
                for work in works:
                    try:
                        work.wait()
                    except RuntimeError:  # the receiver thread of that peer reports it
                        break

    def _finish_reduce(self, works: list[Any], ranks: tuple[int, ...], done: Callable[[], None]) -> None:
        try:
            for work in works:
                work.wait()
            self.inbox.put(done)
        except RuntimeError as error:
            message = f"an all-reduction among ranks {list(ranks)} failed: {error}"
            if not self._closing:
                self.inbox.put(LostPeer(next((r for r in ranks if r != self.rank), self.rank), message))

    def _lost(self, peer: int, error: Exception) -> None:
        if not self._closing:
            text = str(error).splitlines()[0]
            self.inbox.put(LostPeer(peer, text[text.find("] ") + 2 :] if text.startswith("[/") else text))  # no C++ file name


def _as_bytes(tensor: Tensor) -> Tensor:
    """The tensor's memory as flat bytes: gloo then needs to know no dtype (a view where the tensor is contiguous)."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _tag_of(specs: tuple[TensorSpec, ...]) -> int:
    """The same on every rank, and never that of headers."""
    return _FRAME_TAG + 1 + zlib.crc32(repr([(spec.shape, spec.dtype) for spec in specs]).encode()) % (1 << 30)
