"""Collect the stages' tensors on rank 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def gather_on_rank_zero(tensors: Mapping[str, Tensor], *, senders: Sequence[int], group: Any) -> dict[str, Tensor]:
    """All tensors of the ranks in `senders`, on rank 0; nothing on the others. Every rank of `group` (gloo) calls it.

    Names must differ between senders. A sender's tensors travel one at a time, so rank 0 holds the whole once and never
    more.
    """
    rank = dist.get_rank()
    if rank != 0:
        if rank in senders:
            _send(tensors, group)
        return {}
    gathered = {name: tensor.detach().cpu() for name, tensor in tensors.items()} if 0 in senders else {}
    for sender in senders:
        if sender != 0:
            received = _receive(sender, group)
            assert received.keys().isdisjoint(gathered), "two stages speak for one tensor"
            gathered |= received
    return gathered


def _send(tensors: Mapping[str, Tensor], group: Any) -> None:
    dist.send_object_list([[(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]], dst=0, group=group)
    for tensor in tensors.values():
        dist.send(tensor.detach().cpu().contiguous(), dst=0, group=group)


def _receive(sender: int, group: Any) -> dict[str, Tensor]:
    header: list[Any] = [None]
    dist.recv_object_list(header, src=sender, group=group)
    received: dict[str, Tensor] = {}
    for name, shape, dtype in header[0]:
        received[name] = torch.empty(shape, dtype=dtype)
        dist.recv(received[name], src=sender, group=group)
    return received
