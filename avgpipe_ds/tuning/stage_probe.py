"""Micro-batches of other sizes on one stage by itself: how long they take, and what they keep."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from avgpipe_ds import deepspeed_compat as compat
from avgpipe_ds.execution.loss_record import split_loss
from avgpipe_ds.execution.pipeline import Pipeline
from avgpipe_ds.execution.tensors import as_tuple
from avgpipe_ds.memory.activations import ActivationMeter
from avgpipe_ds.tuning.profile import Passes
from avgpipe_ds.tuning.sample import Sample, device_time_s, gradients_of, untouched

__all__ = ["StageProbe", "probe_stage", "sent_bytes"]

_REPEATS = 7
"""Of every size in turn, so that what disturbs the machine for a moment does not decide on one of them."""


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
        trials = [_Trial(pipeline, sample, samples)]
        for size in sorted({*sizes} - {samples}):
            try:
                trials.append(_Trial(pipeline, sample.resized(samples, size), size))
            except Exception:  # noqa: BLE001 - whatever it is, training does not need this size
                continue
        for _ in range(_REPEATS):
            for trial in trials:
                trial.repeat()
    passes = sorted((trial.passes() for trial in trials), key=lambda one: one.samples)
    return StageProbe(passes=tuple(passes), sent_bytes=trials[0].sent_bytes)


@torch.no_grad()
def sent_bytes(pipeline: Pipeline, sample: Sample) -> int:
    """Bytes of the message to the next stage: for stages that can't be tried otherwise."""
    if pipeline.stage.topology.is_last:
        return 0
    with untouched(pipeline):
        return _bytes(_forward(pipeline, sample, sample.inputs))


class _Trial:
    """One size of micro-batches. The first pass finds out what is kept and sent; it warms up, so its time does not count."""

    def __init__(self, pipeline: Pipeline, sample: Sample, size: int) -> None:
        self._pipeline, self._sample, self._size = pipeline, sample, size
        self._weights = [weight for weight in pipeline.module.parameters() if weight.requires_grad]
        self._forward_s: list[float] = []
        self._backward_s: list[float] = []
        meter = ActivationMeter(pipeline.stage.device, pipeline.module.parameters())
        meter.start()
        inputs, leaves = sample.leaves()
        try:
            with meter.forward():
                outputs = _forward(pipeline, sample, inputs)
        finally:
            meter.stop()
        self._backward(outputs, leaves)
        self.activation_bytes = meter.micro_batch_bytes or 0
        self.sent_bytes = 0 if pipeline.stage.topology.is_last else _bytes(outputs)

    def repeat(self) -> None:
        """Forward and backward once more."""
        device = self._pipeline.stage.device
        inputs, leaves = self._sample.leaves()
        start = device_time_s(device)
        outputs = _forward(self._pipeline, self._sample, inputs)
        middle = device_time_s(device)
        self._backward(outputs, leaves)
        self._forward_s.append(middle - start)
        self._backward_s.append(device_time_s(device) - middle)

    def passes(self) -> Passes:
        """Medians of the repeats."""
        return Passes(
            samples=self._size,
            forward_s=statistics.median(self._forward_s),
            backward_s=statistics.median(self._backward_s),
            activation_bytes=self.activation_bytes,
        )

    def _backward(self, outputs: Any, leaves: list[Tensor]) -> None:
        with self._pipeline.random.active():
            gradients_of(outputs, [*leaves, *self._weights])


def _forward(pipeline: Pipeline, sample: Sample, inputs: Any) -> Any:
    """Outputs; on the last stage the loss."""
    with pipeline.random.active():
        outputs = compat.forward_alone(pipeline.engine, inputs)
        if pipeline.stage.topology.is_last and pipeline.module.loss_fn is not None:
            outputs, _ = split_loss(pipeline.module.loss_fn(outputs, sample.labels))
    return outputs


def _bytes(outputs: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in as_tuple(outputs) if isinstance(tensor, Tensor))
