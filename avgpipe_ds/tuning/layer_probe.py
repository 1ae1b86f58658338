"""Each layer of a stage by itself: what the stages could be cut by."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from torch import Tensor

from avgpipe_ds import deepspeed_compat as compat
from avgpipe_ds.execution.loss_record import split_loss
from avgpipe_ds.execution.pipeline import Pipeline
from avgpipe_ds.execution.tensors import as_tuple
from avgpipe_ds.memory.activations import ActivationMeter
from avgpipe_ds.memory.tensors import bytes_of
from avgpipe_ds.tuning.profile import Layer
from avgpipe_ds.tuning.sample import Sample, device_time_s, gradients_of, needs_gradient, untouched

__all__ = ["probe_layers"]

_REPEATS = 5


def probe_layers(pipeline: Pipeline, sample: Sample, *, stage_s: float) -> tuple[Layer, ...]:
    """Run the layers of a stage one after the other, forward and backward; no communication.

    Args:
        pipeline: whose weights compute.
        sample: a micro-batch as the stage gets it.
        stage_s: forward and backward of the whole stage, which the times are scaled to. The loss belongs to the last layer.

    Returns:
        The layers; none where they pass on something other than tensors, so that they can't be tried by themselves.

    """
    found: list[Layer] = []
    layers = compat.layers_of(pipeline.module)
    try:
        with untouched(pipeline), compat.autocast(pipeline.engine):
            for place, (number, function) in enumerate(layers):
                is_end = pipeline.stage.topology.is_last and place == len(layers) - 1
                run = _with_loss(function, pipeline.module.loss_fn, sample.labels) if is_end else function
                weights = compat.weights_of(function)
                seconds, kept, outputs = _measured(pipeline, run, sample, weights)
                found.append(
                    Layer(
                        name=compat.name_of(function),
                        number=number,
                        seconds=seconds,
                        weights=bytes_of(weights),
                        activation_bytes=kept,
                    )
                )
                sample = Sample(outputs, tuple(needs_gradient(value) for value in as_tuple(outputs)), sample.labels)
    except Exception:  # noqa: BLE001 - a proposal is all that is lost
        return ()
    scale = stage_s / max(1e-12, sum(layer.seconds for layer in found))
    return tuple(layer.model_copy(update={"seconds": scale * layer.seconds}) for layer in found)


def _measured(
    pipeline: Pipeline, function: Callable[[Any], Any], sample: Sample, weights: list[Tensor]
) -> tuple[float, int, Any]:
    """Seconds of forward and backward, bytes kept in between, and the outputs."""
    device = pipeline.stage.device
    meter = ActivationMeter(device, pipeline.module.parameters())
    meter.start()
    times = []
    outputs: Any = None
    for repeat in range(_REPEATS + 1):
        inputs, leaves = sample.leaves()
        start = device_time_s(device)
        with pipeline.random.active(), meter.forward():
            outputs = function(inputs)
        meter.stop()  # the first time is the warm-up
        with pipeline.random.active():
            gradients_of(outputs, [*leaves, *(weight for weight in weights if weight.requires_grad)])
        if repeat:
            times.append(device_time_s(device) - start)
    return statistics.median(times), meter.micro_batch_bytes or 0, outputs


def _with_loss(function: Callable[[Any], Any], loss_fn: Any, labels: Any) -> Callable[[Any], Any]:
    return function if loss_fn is None else lambda inputs: split_loss(loss_fn(function(inputs), labels))[0]
