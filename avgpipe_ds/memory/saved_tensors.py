"""What autograd keeps alive between forward and backward, heard from autograd itself.

Process-wide figures compare allocators and libraries. Hooks hear when autograd saves a tensor and when it lets go of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

__all__ = ["SavedTensors"]


class SavedTensors:
    """While it is entered, follows what autograd keeps alive beside the weights; storages count once and as a whole.

    Args:
        weights: tensors that are there anyway.

    Attributes:
        live_bytes: kept at the moment.
        peak_bytes: the most since the last `restart`.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        self.live_bytes = self.peak_bytes = 0
        self._weights = {weight.untyped_storage().data_ptr() for weight in weights}
        self._uses: dict[int, int] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def __enter__(self) -> SavedTensors:
        self._hooks.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._hooks.__exit__(kind, error, trace)

    def restart(self) -> None:
        """Forget the peak so far; what is alive stays counted."""
        self.peak_bytes = self.live_bytes

    def _pack(self, tensor: Tensor) -> Any:
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        tensor = tensor.detach()  # a tensor's own graph must not keep the tensor: nothing would ever release the two
        if key in self._weights:
            return tensor
        if self._uses.setdefault(key, 0) == 0:
            self.live_bytes += storage.nbytes()
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self._uses[key] += 1
        return _Kept(tensor, self)

    def release(self, tensor: Tensor) -> None:
        """Autograd has let go of one use of a tensor that it had saved."""
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        self._uses[key] -= 1
        if self._uses[key] == 0:
            del self._uses[key]
            self.live_bytes -= storage.nbytes()


class _Kept:
    """A saved tensor. It lives exactly as long as autograd keeps the tensor, so its end is the tensor's release."""

    __slots__ = ("owner", "tensor")

    def __init__(self, tensor: Tensor, owner: SavedTensors) -> None:
        self.tensor, self.owner = tensor, owner

    def __del__(self) -> None:
        self.owner.release(self.tensor)


def _unpack(kept: Any) -> Tensor:
    tensor: Tensor = kept.tensor if isinstance(kept, _Kept) else kept
    return tensor
