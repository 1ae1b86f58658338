"""Validation on the reference model: every sample once, and each target with the same weight."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed

from avgpipe_ds.data import Collate, MicroBatch, Sample, evaluation_batches
from avgpipe_ds.data.samples import num_targets_of

__all__ = ["Validation", "validate"]

#: Micro-batches of one `eval_batch` call: enough to keep a pipeline filled, few enough to keep the logits small.
_MICRO_BATCHES_PER_CALL = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """What a validation found; `accuracy` is None for language modelling."""

    loss: float
    num_samples: int
    accuracy: float | None

    @property
    def perplexity(self) -> float:
        """`exp(loss)`, infinite where that overflows."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    def summary(self, *, classes: bool) -> dict[str, float]:
        """Return the numbers worth reporting, by name."""
        quality = {"validation_accuracy": self.accuracy or 0.0} if classes else {"validation_perplexity": self.perplexity}
        return {**quality, "validation_loss": self.loss, "validation_samples": self.num_samples}


def validate(engine: Any, samples: Sequence[Sample], collate: Collate, *, micro_batch_size: int) -> Validation:
    """Validate the reference model. Every rank calls this with the same samples and gets the same result.

    `eval_batch` returns the mean over micro-batches and replicas of the weighted sum of sample losses; with weights of 1
    and 0 that mean, times their number, is the sum over the samples. Only the last stage asks for the logits: it counts
    what is right, and the counts are summed over all ranks, so that no logits travel.
    """
    num_replicas = engine.grid.get_data_parallel_world_size()
    batches = evaluation_batches(
        samples,
        collate,
        micro_batch_size=micro_batch_size,
        replica=engine.grid.get_data_parallel_rank(),
        num_replicas=num_replicas,
    )
    classes = isinstance(samples[0].labels, int)
    total_loss = 0.0
    correct = torch.zeros((), dtype=torch.int64, device=engine.device)
    for start in range(0, len(batches), _MICRO_BATCHES_PER_CALL):
        call = list(batches[start : start + _MICRO_BATCHES_PER_CALL])
        wanted = classes and engine.is_last_stage()
        result = engine.eval_batch(iter(call), return_logits=wanted, num_micro_batches=len(call))
        loss, outputs = result if wanted else (result, [])
        total_loss += float(loss) * len(call) * num_replicas
        for output, batch in zip(outputs, call, strict=False):
            correct += _num_correct(output, batch)
    if classes:
        torch.distributed.all_reduce(correct)
    num_targets = sum(num_targets_of(samples))
    accuracy = float(correct) / len(samples) if classes else None
    return Validation(loss=total_loss / num_targets, num_samples=len(samples), accuracy=accuracy)


def _num_correct(logits: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """Count the right classes among the rows that weigh something; logits [batch, classes]."""
    _, (labels, weights) = batch
    right = logits.argmax(dim=-1) == labels.to(logits.device)
    return (right & (weights.to(logits.device) > 0)).sum()
