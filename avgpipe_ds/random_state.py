"""A random-number stream of its own for every pipeline.

Pipelines interleave differently from run to run, so a shared generator would hand out its numbers in a different order each
time. Each pipeline instead carries its own state, which is swapped in for the duration of one instruction. User code between
the instructions (a shuffling loader, an evaluation with dropout) neither sees nor disturbs it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

__all__ = ["RandomState"]

_SEED_STRIDE = 0x9E3779B97F4A7C15  # the golden ratio in 64 bits: neighbouring pipelines get unrelated seeds


class RandomState:
    """The state of the CPU generator and, on CUDA, of the device's.

    Args:
        device: where the stage computes.
        stream: 0 continues from the generators as they are (so one pipeline draws what plain DeepSpeed draws); any other number
            is a stream of its own, derived from the seed that is in force.

    """

    def __init__(self, device: torch.device, stream: int = 0) -> None:
        self._cuda = device if device.type == "cuda" else None
        outside = self._capture()
        if stream:
            seed = (torch.initial_seed() + stream * _SEED_STRIDE) % (1 << 63)
            torch.default_generator.manual_seed(seed)
            if self._cuda is not None:
                torch.cuda.manual_seed(seed)
        self._state = self._capture()
        self._restore(outside)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Draw from this stream inside the block; outside, nothing has changed."""
        outside = self._capture()
        self._restore(self._state)
        try:
            yield
        finally:
            self._state = self._capture()
            self._restore(outside)

    def state_dict(self) -> dict[str, Any]:
        """The state as tensors, to be saved."""
        return {"cpu": self._state[0].clone(), "cuda": None if self._state[1] is None else self._state[1].clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""
        self._state = (state["cpu"], state["cuda"])

    def _capture(self) -> tuple[Tensor, Tensor | None]:
        return torch.get_rng_state(), None if self._cuda is None else torch.cuda.get_rng_state(self._cuda)

    def _restore(self, state: tuple[Tensor, Tensor | None]) -> None:
        torch.set_rng_state(state[0])
        if self._cuda is not None and state[1] is not None:
            torch.cuda.set_rng_state(state[1], self._cuda)
