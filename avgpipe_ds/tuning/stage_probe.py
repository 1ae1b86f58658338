"""Micro-batches of other sizes on one stage by itself: how long they take, and what they keep.

Slices and repetitions of a micro-batch that was trained go through the stage's layers and back. Nothing of it is left: gradients
go to nobody, and random numbers and buffers are as before.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from avgpipe_ds import deepspeed_compat as compat
from avgpipe_ds.execution.pipeline import Pipeline
from avgpipe_ds.execution.tensors import as_tuple
from avgpipe_ds.memory.activations import ActivationMeter
from avgpipe_ds.tuning.profile import Passes

__all__ = ["Sample", "StageProbe", "probe_stage"]

_REPEATS = 3


@dataclass(frozen=True, slots=True)
class Sample:
    """A micro-batch as a stage got it; detached copies.

    Attributes:
        inputs: a tensor or a tuple of tensors.
        wants_gradient: for each of them, whether the stage before wants one.
        labels: on the last stage.

    """

    inputs: Any
    wants_gradient: tuple[bool, ...]
    labels: Any

    @classmethod
    def of(cls, inputs: Any, labels: Any) -> Sample:
        """Copies."""
        flags = tuple(tensor.requires_grad for tensor in as_tuple(inputs))
        return cls(_map(lambda t: t.detach().clone(), inputs), flags, _map(lambda t: t.detach().clone(), labels))

    def splits(self, samples: int) -> bool:
        """Whether all of it has one entry for each of `samples` samples, so that other sizes can be made of it."""
        tensors = [*as_tuple(self.inputs), *(() if self.labels is None else as_tuple(self.labels))]
        return all(tensor.dim() > 0 and len(tensor) == samples for tensor in tensors)

    def resized(self, samples: int, new: int) -> Sample:
        """The first `new` samples; the same ones again where it has fewer."""

        def resize(tensor: Tensor) -> Tensor:
            return torch.cat([tensor] * -(-new // samples))[:new].clone()  # not a view of more than it shows

        return Sample(_map(resize, self.inputs), self.wants_gradient, _map(resize, self.labels))


@dataclass(frozen=True, slots=True, kw_only=True)
class StageProbe:
    """What was found.

    Attributes:
        passes: by size, ascending.
        activation_bytes, gradient_bytes: of the messages to the next and the previous stage for the size that is trained.

    """

    passes: tuple[Passes, ...]
    activation_bytes: int
    gradient_bytes: int

    def seconds(self, samples: int) -> float:
        """Forward and backward of a micro-batch of a size that was tried."""
        return next(one.forward_s + one.backward_s for one in self.passes if one.samples == samples)


def probe_stage(pipeline: Pipeline, sample: Sample, *, samples: int, sizes: Sequence[int]) -> StageProbe:
    """Run micro-batches of `sizes` samples on the stage of a pipeline; no communication.

    Args:
        pipeline: whose weights compute.
        sample: what was trained, of `samples` samples.
        samples: of the micro-batches that are trained; it is one of `sizes`.
        sizes: to be tried; one for which the memory of the device does not suffice is left out.

    """
    random, buffers = pipeline.random.state_dict(), [buffer.detach().clone() for buffer in pipeline.module.buffers()]
    passes: list[Passes] = []
    activation_bytes = gradient_bytes = 0
    for size in sorted(sizes):
        resized = sample if size == samples else sample.resized(samples, size)
        try:
            found, sent = _passes(pipeline, resized, size)
        except torch.OutOfMemoryError:
            break
        passes.append(found)
        if size == samples:
            activation_bytes = sent
            tensors = zip(as_tuple(sample.inputs), sample.wants_gradient, strict=True)
            gradient_bytes = sum(tensor.numel() * tensor.element_size() for tensor, wanted in tensors if wanted)
    pipeline.random.load_state_dict(random)
    with torch.no_grad():
        for buffer, value in zip(pipeline.module.buffers(), buffers, strict=True):
            buffer.copy_(value)
    return StageProbe(passes=tuple(passes), activation_bytes=activation_bytes, gradient_bytes=gradient_bytes)


def _passes(pipeline: Pipeline, sample: Sample, size: int) -> tuple[Passes, int]:
    """Medians, and the bytes that go to the next stage."""
    device = pipeline.stage.device
    meter = ActivationMeter(device, pipeline.module.parameters())
    meter.start()
    with meter.forward():
        outputs = _forward(pipeline, sample)[0]
    last = pipeline.stage.topology.is_last
    sent = 0 if last else sum(tensor.numel() * tensor.element_size() for tensor in as_tuple(outputs))
    meter.stop()
    del outputs
    forward_s, backward_s = [], []
    for _ in range(_REPEATS):
        start = _now(device)
        outputs, inputs = _forward(pipeline, sample)
        middle = _now(device)
        _backward(pipeline, outputs, inputs)
        end = _now(device)
        forward_s.append(middle - start)
        backward_s.append(end - middle)
    passes = Passes(
        samples=size,
        forward_s=statistics.median(forward_s),
        backward_s=statistics.median(backward_s),
        activation_bytes=meter.micro_batch_bytes or 0,
    )
    return passes, sent


def _forward(pipeline: Pipeline, sample: Sample) -> tuple[Any, list[Tensor]]:
    """Outputs, the loss on the last stage, and the inputs that want a gradient."""
    leaves = [t.detach().requires_grad_(wanted) for t, wanted in zip(as_tuple(sample.inputs), sample.wants_gradient, strict=True)]
    inputs = tuple(leaf.clone() for leaf in leaves) if isinstance(sample.inputs, tuple) else leaves[0].clone()
    with pipeline.random.active():
        outputs = compat.forward_alone(pipeline.engine, inputs)
        if pipeline.stage.topology.is_last and pipeline.module.loss_fn is not None:
            outputs = pipeline.module.loss_fn(outputs, sample.labels)
    return outputs, [leaf for leaf in leaves if leaf.requires_grad]


def _backward(pipeline: Pipeline, outputs: Any, inputs: list[Tensor]) -> None:
    """Gradients of inputs and weights, as in training, which then are dropped."""
    wanted = [*inputs, *(p for p in pipeline.module.parameters() if p.requires_grad)]
    sources = [tensor for tensor in as_tuple(outputs) if tensor.requires_grad]
    if sources and wanted:
        with pipeline.random.active():
            torch.autograd.grad(sources, wanted, [torch.ones_like(tensor) for tensor in sources], allow_unused=True)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _map(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    if value is None or isinstance(value, Tensor):
        return None if value is None else function(value)
    return tuple(function(tensor) for tensor in value)
