"""What travels between two ranks.

A message is a small host-side header (channel, payload, and shape, dtype and `requires_grad` of every tensor) followed by the
tensors. The header always goes first, so a receiver allocates exactly what comes and starts a device receive only once its
sender has started to send. Variable lengths, new dtypes and tensors without gradient are therefore no special case, and no
receive waits on the device for a message that does not exist yet (an early NCCL receive would hold a part of the GPU all that
time).
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Message", "TensorSpec", "decode_header", "encode_header"]


class TensorSpec(NamedTuple):
    """What a receiver must know of a tensor before it arrives."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @property
    def num_bytes(self) -> int:
        """Size of the tensor's memory."""
        return math.prod(self.shape) * self.dtype.itemsize

    def allocate(self, device: torch.device) -> Tensor:
        """An uninitialised tensor of this shape and dtype; `requires_grad` is left to the receiver."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


@dataclass(frozen=True, slots=True)
class Message:
    """One message.

    Attributes:
        channel: where the receiver looks for it; messages of one channel from one sender keep their order.
        payload: small picklable host data (losses, micro-batch number, error texts).
        tensors: any shapes and dtypes; never written to after they were handed to `send`.
        requires_grad: per tensor, whether the sender wants a gradient back.
        source: rank of the sender; filled in by the transport.

    """

    channel: Hashable
    payload: Any = None
    tensors: tuple[Tensor, ...] = ()
    requires_grad: tuple[bool, ...] = ()
    source: int = -1

    def specs(self) -> tuple[TensorSpec, ...]:
        """What the header says of the tensors."""
        flags = self.requires_grad or (False,) * len(self.tensors)
        return tuple(TensorSpec(tuple(t.shape), t.dtype, flag) for t, flag in zip(self.tensors, flags, strict=True))


def encode_header(channel: Hashable, payload: Any, specs: tuple[TensorSpec, ...]) -> bytes:
    """The header as bytes. Ranks of one job trust each other, hence pickle."""
    return pickle.dumps((channel, payload, specs), protocol=pickle.HIGHEST_PROTOCOL)


def decode_header(header: bytes) -> tuple[Hashable, Any, tuple[TensorSpec, ...]]:
    """Inverse of `encode_header`: channel, payload, specs."""
    channel, payload, specs = pickle.loads(header)
    return channel, payload, specs
