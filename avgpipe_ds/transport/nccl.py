"""Messages over NCCL: headers stay on the host (gloo), tensors go from device to device.

Written to the same interface, not yet proven on hardware. Between two ranks each direction has a communicator of its own.
Headers go first and arrive in order, and one thread per peer starts the receives in that order, so both ends of a communicator
see its operations in one order. Receives run on a side stream; the computation waits for them through an event, never the host.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from avgpipe_ds.transport.gloo import GlooTransport
from avgpipe_ds.transport.message import TensorSpec

__all__ = ["NcclTransport"]


class NcclTransport(GlooTransport):
    """As `GlooTransport`, for CUDA tensors. Collective: every rank builds it at the same point."""

    _reduce_backend = "nccl"

    def __init__(self, device: torch.device, neighbours: list[tuple[int, int]]) -> None:
        """`neighbours`: all (sender, receiver) pairs of the job that exchange tensors, the same list on every rank."""
        self._pairs = {(sender, receiver): dist.new_group([sender, receiver], backend="nccl") for sender, receiver in neighbours}
        self._streams: dict[int, torch.cuda.Stream] = {}
        super().__init__(device)

    def _fits(self, specs: tuple[TensorSpec, ...], header_bytes: int) -> bool:
        return not specs  # tensors stay on the device

    def _stream(self, peer: int) -> torch.cuda.Stream:
        if peer not in self._streams:
            self._streams[peer] = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        return self._streams[peer]

    def _send_tensors(self, to: int, tensors: tuple[Tensor, ...], specs: tuple[TensorSpec, ...], works: list[Any]) -> Any:
        flat = [t.detach().contiguous() for t in tensors if t.numel()]
        group = self._pairs[self.rank, to] if flat else None
        works.extend(dist.isend(t, to, group=group) for t in flat)
        return flat

    def _receive_tensors(self, peer: int, specs: tuple[TensorSpec, ...]) -> tuple[list[Tensor], list[Any]]:
        torch.cuda.set_device(self.device)
        stream = self._stream(peer)
        with torch.cuda.stream(stream):
            tensors = [spec.allocate(self.device) for spec in specs]
            works = [dist.irecv(t, peer, group=self._pairs[peer, self.rank]) for t in tensors if t.numel()]
        return tensors, [*works, _StreamOrder(stream, tensors)]


class _StreamOrder:
    """Stands among the works of a message: makes the device, not the host, wait for the receives of a side stream."""

    def __init__(self, stream: torch.cuda.Stream, tensors: list[Tensor]) -> None:
        self._stream, self._tensors = stream, tensors

    def wait(self) -> None:
        """The compute stream is ordered after everything on the side stream so far, and owns the tensors."""
        compute = torch.cuda.default_stream(self._tensors[0].device) if self._tensors else None
        if compute is not None:
            compute.wait_stream(self._stream)
            for tensor in self._tensors:
                tensor.record_stream(compute)
