"""How many bytes a stage keeps between forwards and backwards, measured while it trains.

On CPU, autograd's own hooks tell what it saves and releases. On CUDA the allocator knows it anyway, with what it rounds up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from avgpipe_ds.memory.saved_tensors import SavedTensors

__all__ = ["ActivationMeter"]


class ActivationMeter:
    """Measures the forwards of some iterations. Where hooks of the user's are in force, as for offloading, it leaves them alone.

    Args:
        device: where the stage computes.
        weights: of all pipelines: saved for a backward, but there anyway.

    Attributes:
        micro_batch_bytes: that a forward of one micro-batch leaves for its backward, the largest seen; None if none was measured.
        peak_bytes: the most that all pipelines kept at a time.
        why_nothing: what to do about it where nothing was measured.

    """

    def __init__(self, device: torch.device, weights: Iterable[Tensor]) -> None:
        self.micro_batch_bytes: int | None = None
        self.peak_bytes = 0
        self.why_nothing = "train an iteration first: it tells what training has shown"
        self._device = device
        self._saved = SavedTensors(weights)
        self._measuring = False
        self._base_bytes = 0

    def start(self) -> None:
        """Measure from now on."""
        self.micro_batch_bytes, self.peak_bytes, self._measuring = None, 0, True
        self._saved.restart()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._base_bytes = torch.cuda.memory_allocated(self._device) - self._saved.live_bytes

    def stop(self) -> None:
        """Measure no more; what was found stays."""
        self._measuring = False

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around the forward of one micro-batch."""
        if self._measuring and _hooks_in_force():
            self.why_nothing = "hooks on saved tensors were in force, such as save_on_cpu(): train the first iterations without"
        if not self._measuring or _hooks_in_force():
            yield
            return
        before = self._kept_bytes()
        if self._device.type == "cuda":
            yield
        else:
            with self._saved:
                yield
        self.micro_batch_bytes = max(self.micro_batch_bytes or 0, self._kept_bytes() - before)
        self.peak_bytes = max(self.peak_bytes, self._most_bytes())

    def _kept_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else self._saved.live_bytes

    def _most_bytes(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) - self._base_bytes
        return self._saved.peak_bytes


def _hooks_in_force() -> bool:
    """Whether somebody else has hooks on saved tensors: only the innermost are called, so ours would hide them."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
