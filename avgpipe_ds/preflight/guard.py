"""Compute on a module and leave no trace in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from avgpipe_ds import deepspeed_compat as compat
from avgpipe_ds.random_state import RandomState

__all__ = ["untouched"]


@contextmanager
def untouched(module: compat.PipelineModule, device: torch.device, *, training: bool) -> Iterator[None]:
    """Inside the block the module is in training mode, or not; random numbers, buffers and modes are afterwards as before.

    Gradients are to be taken with `torch.autograd.grad`, which does not write into parameters.
    """
    buffers = [buffer.detach().clone() for buffer in module.buffers()]
    modes = {part: part.training for part in module.modules()}
    module.train(training)
    try:
        with torch.enable_grad(), RandomState(device).active():
            yield
    finally:
        for part, mode in modes.items():
            part.training = mode
        for buffer, value in zip(module.buffers(), buffers, strict=True):
            buffer.data.copy_(value)
