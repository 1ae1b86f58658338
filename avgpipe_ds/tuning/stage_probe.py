"""Micro-batches of other sizes on one stage by itself: how long they take, and what they keep."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from avgpipe_ds import deepspeed_compat as compat
from avgpipe_ds.execution.pipeline import Pipeline
from avgpipe_ds.execution.tensors import as_tuple
from avgpipe_ds.memory.activations import ActivationMeter
from avgpipe_ds.tuning.profile import Passes
from avgpipe_ds.tuning.sample import Sample, device_time_s, gradients_of, untouched

__all__ = ["StageProbe", "probe_stage", "sent_bytes"]

_REPEATS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class StageProbe:
    """What was found.

    Attributes:
        passes: by size, ascending.
        sent_bytes: of the message to the next stage for the size that is trained.

    """

    passes: tuple[Passes, ...]
    sent_bytes: int

    def at(self, samples: int) -> Passes:
        """Of a size that was tried."""
        return next(one for one in self.passes if one.samples == samples)


def probe_stage(pipeline: Pipeline, sample: Sample, *, samples: int, sizes: Sequence[int]) -> StageProbe:
    """Run micro-batches of `sizes` samples on the stage of a pipeline; no communication.

    Args:
        pipeline: whose weights compute.
        sample: what was trained, of `samples` samples.
        samples: of the micro-batches that are trained.
        sizes: others to be tried. One that the model can't compute, such as a single sample under batch normalisation, or that
            does not fit into memory, is left out.

    """
    with untouched(pipeline):
        own, sent = _passes(pipeline, sample, samples)
        passes = [own]
        for size in sorted({*sizes} - {samples}):
            try:
                passes.append(_passes(pipeline, sample.resized(samples, size), size)[0])
            except Exception:  # noqa: BLE001 - whatever it is, training does not need this size
                continue
    return StageProbe(passes=tuple(sorted(passes, key=lambda one: one.samples)), sent_bytes=sent)


@torch.no_grad()
def sent_bytes(pipeline: Pipeline, sample: Sample) -> int:
    """Bytes of the message to the next stage: for stages that can't be tried otherwise."""
    if pipeline.stage.topology.is_last:
        return 0
    with untouched(pipeline):
        return _bytes(_forward(pipeline, sample, sample.inputs))


def _passes(pipeline: Pipeline, sample: Sample, size: int) -> tuple[Passes, int]:
    """Medians, and the bytes that go to the next stage."""
    device, weights = pipeline.stage.device, [p for p in pipeline.module.parameters() if p.requires_grad]
    meter = ActivationMeter(device, pipeline.module.parameters())
    meter.start()
    with meter.forward():
        outputs = _forward(pipeline, sample, sample.leaves()[0])
    meter.stop()
    sent = 0 if pipeline.stage.topology.is_last else _bytes(outputs)
    del outputs
    forward_s, backward_s = [], []
    for _ in range(_REPEATS):
        inputs, leaves = sample.leaves()
        start = device_time_s(device)
        outputs = _forward(pipeline, sample, inputs)
        middle = device_time_s(device)
        with pipeline.random.active():
            gradients_of(outputs, [*leaves, *weights])
        end = device_time_s(device)
        forward_s.append(middle - start)
        backward_s.append(end - middle)
    passes = Passes(
        samples=size,
        forward_s=statistics.median(forward_s),
        backward_s=statistics.median(backward_s),
        activation_bytes=meter.micro_batch_bytes or 0,
    )
    return passes, sent


def _forward(pipeline: Pipeline, sample: Sample, inputs: Any) -> Any:
    """Outputs; on the last stage the loss."""
    with pipeline.random.active():
        outputs = compat.forward_alone(pipeline.engine, inputs)
        if pipeline.stage.topology.is_last and pipeline.module.loss_fn is not None:
            outputs = pipeline.module.loss_fn(outputs, sample.labels)
    return outputs


def _bytes(outputs: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in as_tuple(outputs) if isinstance(tensor, Tensor))
