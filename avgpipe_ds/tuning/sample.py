"""A micro-batch as a stage got it, in any number of samples; and computing on it without leaving a trace."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from avgpipe_ds.execution.pipeline import Pipeline
from avgpipe_ds.execution.tensors import as_tuple, map_tensors

__all__ = ["Sample", "device_time_s", "gradients_of", "needs_gradient", "untouched"]


@dataclass(frozen=True, slots=True)
class Sample:
    """Detached copies.

    Attributes:
        inputs: a tensor or a tuple of tensors; between the layers of a stage of other things, too, which stay as they are.
        wants_gradient: for each of them, whether the stage before wants one.
        labels: on the last stage.

    """

    inputs: Any
    wants_gradient: tuple[bool, ...]
    labels: Any

    @classmethod
    def of(cls, inputs: Any, labels: Any) -> Sample:
        """Copies."""
        flags = tuple(needs_gradient(tensor) for tensor in as_tuple(inputs))
        return cls(map_tensors(_copy, inputs), flags, map_tensors(_copy, labels))

    def splits(self, samples: int) -> bool:
        """Whether all of it has one entry for each of `samples` samples, so that other sizes can be made of it."""
        tensors = [*as_tuple(self.inputs), *(() if self.labels is None else as_tuple(self.labels))]
        return all(tensor.dim() > 0 and len(tensor) == samples for tensor in tensors)

    def resized(self, samples: int, new: int) -> Sample:
        """The first `new` of `samples` samples; the same ones again where it has fewer."""

        def resize(tensor: Tensor) -> Tensor:
            return torch.cat([tensor] * -(-new // samples))[:new].clone()  # not a view of more than it shows

        return Sample(map_tensors(resize, self.inputs), self.wants_gradient, map_tensors(resize, self.labels))

    def leaves(self) -> tuple[Any, list[Tensor]]:
        """Inputs to compute on, as the pipeline makes them, and those leaves behind them that collect a gradient."""
        wanted = zip(as_tuple(self.inputs), self.wants_gradient, strict=True)
        leaves = [value.detach().requires_grad_(flag) if isinstance(value, Tensor) else value for value, flag in wanted]
        inputs = tuple(leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        return inputs if isinstance(self.inputs, tuple) else inputs[0], [leaf for leaf in leaves if needs_gradient(leaf)]

    @property
    def gradient_bytes(self) -> int:
        """Of the message to the stage before."""
        wanted = zip(as_tuple(self.inputs), self.wants_gradient, strict=True)
        return sum(tensor.numel() * tensor.element_size() for tensor, flag in wanted if flag)


@contextmanager
def untouched(pipeline: Pipeline) -> Iterator[None]:
    """Random numbers and buffers are afterwards as before; forwards under way do not notice that buffers changed meanwhile."""
    random, buffers = pipeline.random.state_dict(), [buffer.detach().clone() for buffer in pipeline.module.buffers()]
    try:
        yield
    finally:
        pipeline.random.load_state_dict(random)
        for buffer, value in zip(pipeline.module.buffers(), buffers, strict=True):
            buffer.data.copy_(value)


def gradients_of(outputs: Any, wanted: list[Tensor]) -> None:
    """Go back from outputs to what wants a gradient, as in training; the gradients are dropped."""
    sources = [tensor for tensor in as_tuple(outputs) if needs_gradient(tensor)]
    if sources and wanted:
        torch.autograd.grad(sources, wanted, [torch.ones_like(tensor) for tensor in sources], allow_unused=True)


def needs_gradient(value: Any) -> bool:
    """Whether it is a tensor that takes part in a graph."""
    return isinstance(value, Tensor) and value.requires_grad


def device_time_s(device: torch.device) -> float:
    """The time, once the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()
