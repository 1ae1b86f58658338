"""Micro-batches as the engine takes them: `((input_ids, attention_mask), (labels, weight))`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.errors import RecipeError
from common.sampler import BatchShape, epoch_order, plan_iteration, position_of
from common.samples import Sample

__all__ = ["Collate", "MicroBatch", "training_batches"]

MicroBatch = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]

#: What the loss leaves out, as everywhere in PyTorch and transformers.
IGNORED = -100


@dataclass(frozen=True, slots=True, kw_only=True)
class Collate:
    """Makes tensors of samples, padded to the longest of them.

    The length is rounded up to a multiple of 8, which matrix units like and which keeps the number of different shapes
    small, but never above `max_length`: the model may have no position behind it.
    """

    pad_token_id: int
    max_length: int

    def __call__(self, samples: Sequence[Sample], weights: Sequence[float]) -> MicroBatch:
        """Return the tensors of one micro-batch.

        `input_ids` and `attention_mask` are int64 [batch, length]. Labels are int64: classes [batch], or tokens
        [batch, length] that stand where the inputs stand (the loss shifts them), -100 on padding. Weights are fp32 [batch].
        """
        longest = max(len(sample.input_ids) for sample in samples)
        length = max(longest, min(-(-longest // 8) * 8, self.max_length))
        input_ids = torch.full((len(samples), length), self.pad_token_id, dtype=torch.int64)
        attention_mask = torch.zeros_like(input_ids)
        for row, sample in enumerate(samples):
            input_ids[row, : len(sample.input_ids)] = torch.tensor(sample.input_ids)
            attention_mask[row, : len(sample.input_ids)] = 1
        classes = [sample.label for sample in samples if sample.label is not None]
        labels = torch.tensor(classes) if classes else input_ids.masked_fill(attention_mask == 0, IGNORED)
        return (input_ids, attention_mask), (labels, torch.tensor(weights, dtype=torch.float32))


def training_batches(
    samples: Sequence[Sample],
    collate: Collate,
    shape: BatchShape,
    *,
    replica: int,
    seed: int,
    first_iteration: int,
    num_iterations: int,
) -> Iterator[MicroBatch]:
    """Yield one replica's micro-batches for the iterations from `first_iteration` up to `num_iterations`, epoch after epoch.

    A run that resumes passes the iterations already trained as `first_iteration` and gets exactly what would have come
    next; nothing needs to be stored or skipped, since an epoch's order follows from its number. The iterator ends with the
    last iteration, so the engine, which takes data ahead, starts no work that would be thrown away.
    """
    if not samples:
        raise RecipeError("There is no sample to train on.")
    num_targets = [sample.num_targets for sample in samples]
    return _training_batches(samples, num_targets, collate, shape, replica, seed, range(first_iteration, num_iterations))


def _training_batches(
    samples: Sequence[Sample],
    num_targets: Sequence[int],
    collate: Collate,
    shape: BatchShape,
    replica: int,
    seed: int,
    iterations: range,
) -> Iterator[MicroBatch]:
    order: Sequence[int] = ()
    order_epoch = -1
    for run_iteration in iterations:
        epoch, iteration = position_of(run_iteration, len(samples), shape)
        if epoch != order_epoch:
            order, order_epoch = epoch_order(len(samples), seed=seed, epoch=epoch), epoch
        for pipeline in plan_iteration(order, num_targets, shape, iteration):
            for slots in pipeline[replica]:
                yield collate([samples[slot.sample] for slot in slots], [slot.weight for slot in slots])
