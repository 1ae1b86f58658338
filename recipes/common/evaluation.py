"""Validation on the reference model: every sample once, and each target with the same weight."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed

from common.batches import Collate, MicroBatch
from common.samples import Sample

__all__ = ["Validation", "validate", "validation_rounds"]

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


#: Rows of one micro-batch, with weight 1 each, or 0 where the row only fills up.
Rows = list[tuple[Sample, float]]


def validation_rounds(
    samples: Sequence[Sample], *, micro_batch_size: int, num_replicas: int, micro_batches_per_call: int = _MICRO_BATCHES_PER_CALL
) -> Iterator[list[list[Rows]]]:
    """Yield `[replica][micro-batch]` of every `eval_batch` call.

    Samples of like length go together, so that little is computed for padding. All replicas run the same number of
    micro-batches: where they would not, some are given micro-batches that weigh 0.
    """
    ordered = sorted(samples, key=lambda sample: -len(sample.input_ids))
    micro_batches: list[Rows] = []
    for start in range(0, len(ordered), micro_batch_size):
        rows = ordered[start : start + micro_batch_size]
        micro_batches.append([(row, 1.0) for row in rows] + [(rows[-1], 0.0)] * (micro_batch_size - len(rows)))
    idle: Rows = [(ordered[-1], 0.0)] * micro_batch_size if ordered else []
    micro_batches += [idle] * (-len(micro_batches) % num_replicas)
    per_call = micro_batches_per_call * num_replicas
    for start in range(0, len(micro_batches), per_call):
        call = micro_batches[start : start + per_call]
        yield [call[replica::num_replicas] for replica in range(num_replicas)]


def validate(engine: Any, samples: Sequence[Sample], collate: Collate, *, micro_batch_size: int) -> Validation:
    """Validate the reference model. Every rank calls this with the same samples and gets the same result.

    `eval_batch` returns the mean over micro-batches and replicas of the weighted sum of sample losses; with weights of 1
    and 0 that mean, times their number, is the sum over the samples. Only the last stage asks for the logits: it counts
    what is right, and the counts are summed over all ranks, so that no logits travel.
    """
    num_replicas = engine.grid.get_data_parallel_world_size()
    replica = engine.grid.get_data_parallel_rank()
    classes = samples[0].label is not None
    total_loss = 0.0
    correct = torch.zeros((), dtype=torch.int64, device=engine.device)
    for call in validation_rounds(samples, micro_batch_size=micro_batch_size, num_replicas=num_replicas):
        batches = [collate([sample for sample, _ in rows], [weight for _, weight in rows]) for rows in call[replica]]
        wanted = classes and engine.is_last_stage()
        result = engine.eval_batch(iter(batches), return_logits=wanted, num_micro_batches=len(batches))
        loss, outputs = result if wanted else (result, [])
        total_loss += float(loss) * len(batches) * num_replicas
        for output, batch in zip(outputs, batches, strict=False):
            correct += _num_correct(output, batch)
    if classes:
        torch.distributed.all_reduce(correct)
    num_targets = sum(sample.num_targets for sample in samples)
    accuracy = float(correct) / len(samples) if classes else None
    return Validation(loss=total_loss / num_targets, num_samples=len(samples), accuracy=accuracy)


def _num_correct(logits: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """Count the right classes among the rows that weigh something; logits [batch, classes]."""
    _, (labels, weights) = batch
    right = logits.argmax(dim=-1) == labels.to(logits.device)
    return (right & (weights.to(logits.device) > 0)).sum()
