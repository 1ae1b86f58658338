"""Evaluation as `Trainer` does it: `compute_metrics` of an `EvalPrediction`, arrays of one shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist
from transformers import EvalPrediction

from avgpipe_ds.data import Collate, Sample, evaluation_batches
from avgpipe_ds.data.encoding import IGNORED
from avgpipe_ds.engine import AvgPipeEngine

__all__ = ["ComputeMetrics", "Evaluator", "Predicted", "PreprocessLogits"]

ComputeMetrics = Callable[[EvalPrediction], Mapping[str, Any]]
"""`compute_metrics(prediction)`: numbers by name, from `prediction.predictions` and `.label_ids`, arrays `[samples, ...]`."""

PreprocessLogits = Callable[[Any, Any], Any]
"""`preprocess(logits, labels)` of a micro-batch: what is kept of the logits."""


class Predicted(NamedTuple):
    """Outputs and labels of all samples, arrays `[samples, ...]` or tuples of them; and the loss and metrics."""

    predictions: Any
    label_ids: Any
    scores: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluator:
    """Evaluates the reference model of an engine. Every rank calls its methods.

    Attributes:
        engine: whose reference model it is.
        collate: makes tensors of samples.
        micro_batch_size: samples of a micro-batch.
        compute_metrics: runs on one rank; None for the loss alone.
        preprocess_logits: runs on the last stage, where there is something to look at the outputs.

    """

    engine: AvgPipeEngine
    collate: Collate
    micro_batch_size: int
    compute_metrics: ComputeMetrics | None
    preprocess_logits: PreprocessLogits | None

    def evaluate(self, samples: Sequence[Sample]) -> dict[str, float]:
        """The loss, and what `compute_metrics` gives."""
        return self._evaluate(samples, self.compute_metrics)

    def predict(self, samples: Sequence[Sample]) -> Predicted:
        """The outputs and labels too, on every rank: they are copied to each."""
        found: list[EvalPrediction] = []

        def keep(prediction: EvalPrediction) -> Mapping[str, Any]:
            found.append(prediction)
            return {} if self.compute_metrics is None else self.compute_metrics(prediction)

        scores = self._evaluate(samples, keep)
        self.engine.meet("predict")
        group = dist.new_group(backend="gloo")  # of its own, so that nothing under way can mix with this
        try:
            every: list[Any] = [None] * dist.get_world_size()
            mine = (found[0].predictions, found[0].label_ids) if found else None
            dist.all_gather_object(every, mine, group=group)
        finally:
            dist.destroy_process_group(group)
        predictions, labels = next(theirs for theirs in every if theirs is not None)
        return Predicted(predictions, labels, scores)

    def _evaluate(self, samples: Sequence[Sample], compute_metrics: ComputeMetrics | None) -> dict[str, float]:
        batches = evaluation_batches(
            samples,
            self.collate,
            micro_batch_size=self.micro_batch_size,
            replica=self.engine.grid.get_data_parallel_rank(),
            num_replicas=self.engine.grid.get_data_parallel_world_size(),
        )
        places = [[slot.sample if slot.weight else None for slot in slots] for slots in batches.plan]
        if compute_metrics is None:
            return self.engine.evaluate(batches, samples=places)
        compute = compute_metrics

        def metrics(predictions: Any, labels: Any) -> Mapping[str, Any]:
            return compute(EvalPrediction(predictions=rectangular(predictions), label_ids=rectangular(labels)))

        return self.engine.evaluate(batches, metrics=metrics, samples=places, reduce_outputs=self.preprocess_logits)


def rectangular(rows: Any) -> Any:
    """One array, samples of different lengths filled up with -100, as `Trainer` does; of a tuple, each part.

    Args:
        rows: an array, or a list of arrays that differ in the first dimension only; or a tuple of those.

    """
    if isinstance(rows, tuple):
        return tuple(rectangular(part) for part in rows)
    if isinstance(rows, np.ndarray):
        return rows
    length = max(len(row) for row in rows)
    filled = np.full((len(rows), length, *rows[0].shape[1:]), IGNORED, dtype=rows[0].dtype)
    for place, row in zip(filled, rows, strict=True):
        place[: len(row)] = row
    return filled
