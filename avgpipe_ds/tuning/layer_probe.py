"""Each layer of a stage by itself: what the stages could be cut by."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from avgpipe_ds.execution.pipeline import Pipeline
from avgpipe_ds.execution.tensors import as_tuple
from avgpipe_ds.memory.activations import ActivationMeter
from avgpipe_ds.memory.tensors import bytes_of
from avgpipe_ds.tuning.profile import Layer
from avgpipe_ds.tuning.stage_probe import Sample

__all__ = ["probe_layers"]

_REPEATS = 3


def probe_layers(pipeline: Pipeline, sample: Sample, *, stage_s: float) -> tuple[Layer, ...]:
    """Run the layers of a stage one after the other, forward and backward; no communication, and nothing of it is left.

    Args:
        pipeline: whose weights compute.
        sample: a micro-batch as the stage gets it.
        stage_s: forward and backward of the whole stage, which the times are scaled to: the loss belongs to the last layer.

    """
    random, buffers = pipeline.random.state_dict(), [buffer.detach().clone() for buffer in pipeline.module.buffers()]
    found: list[Layer] = []
    value: Any = sample.inputs
    flags = sample.wants_gradient
    for place, function in enumerate(pipeline.module.forward_funcs):
        seconds, kept, value = _measured(pipeline, function, value, flags)
        flags = tuple(tensor.requires_grad for tensor in as_tuple(value))
        weights = _weights(function)
        found.append(
            Layer(
                name=type(getattr(function, "__self__", function)).__name__,
                number=pipeline.module._local_start + place,
                seconds=seconds,
                weights=bytes_of(weights),
                activation_bytes=kept,
            )
        )
    pipeline.random.load_state_dict(random)
    with torch.no_grad():
        for buffer, before in zip(pipeline.module.buffers(), buffers, strict=True):
            buffer.copy_(before)
    scale = stage_s / max(1e-12, sum(layer.seconds for layer in found))
    return tuple(layer.model_copy(update={"seconds": scale * layer.seconds}) for layer in found)


def _measured(pipeline: Pipeline, function: Any, value: Any, flags: Sequence[bool]) -> tuple[float, int, Any]:
    """Seconds of forward and backward, bytes kept in between, and the outputs."""
    device = pipeline.stage.device
    meter = ActivationMeter(device, pipeline.module.parameters())
    meter.start()
    times = []
    outputs: Any = None
    for repeat in range(_REPEATS + 1):
        leaves = [t.detach().requires_grad_(wanted) for t, wanted in zip(as_tuple(value), flags, strict=True)]
        inputs = tuple(leaf.clone() for leaf in leaves) if isinstance(value, tuple) else leaves[0].clone()
        start = _now(device)
        with pipeline.random.active(), meter.forward():
            outputs = function(inputs)
        meter.stop()  # the first time is the warm-up
        sources = [tensor for tensor in as_tuple(outputs) if tensor.requires_grad]
        wanted = [leaf for leaf in leaves if leaf.requires_grad] + [w for w in _weights(function) if w.requires_grad]
        if sources and wanted:
            torch.autograd.grad(sources, wanted, [torch.ones_like(tensor) for tensor in sources], allow_unused=True)
        if repeat:
            times.append(_now(device) - start)
    return statistics.median(times), meter.micro_batch_bytes or 0, outputs


def _weights(function: Any) -> list[Tensor]:
    """Of a layer; of a tied one, whose function is a partial of the module, those of the module."""
    modules = [function, *getattr(function, "args", ())]
    return [weight for module in modules if isinstance(module, torch.nn.Module) for weight in module.parameters()]


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
