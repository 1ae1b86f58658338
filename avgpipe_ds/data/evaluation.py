"""Micro-batches of a whole data set: every sample once, with weight 1, and rows that only fill up, with weight 0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from avgpipe_ds.data.collate import Collate, MicroBatch
from avgpipe_ds.data.sampler import MicroBatchPlan, Slot
from avgpipe_ds.data.samples import Sample, lengths_of
from avgpipe_ds.errors import DataError

__all__ = ["EvaluationBatches", "evaluation_batches", "plan_evaluation"]


def plan_evaluation(lengths: Sequence[int], *, micro_batch_size: int, num_replicas: int = 1) -> list[list[MicroBatchPlan]]:
    """The slots `[replica][micro-batch][row]` in which every sample is evaluated once.

    Samples of like length go together, so that little is computed for padding, and the longest come first, so that memory
    is used up at once or never. All replicas get as many micro-batches: where they would not, some get those that weigh 0.
    """
    ordered = sorted(range(len(lengths)), key=lambda sample: -lengths[sample])
    plan: list[MicroBatchPlan] = []
    for start in range(0, len(ordered), micro_batch_size):
        run = ordered[start : start + micro_batch_size]
        plan.append([Slot(sample, 1.0) for sample in run] + [Slot(run[-1], 0.0)] * (micro_batch_size - len(run)))
    plan += [[Slot(ordered[-1], 0.0)] * micro_batch_size for _ in range(-len(plan) % num_replicas)]
    return [plan[replica::num_replicas] for replica in range(num_replicas)]


class EvaluationBatches(Sequence[MicroBatch]):
    """One replica's micro-batches; each becomes tensors when it is asked for.

    Attributes:
        plan: which samples are in the rows of every micro-batch, and with which weights: to put outputs back into the
            samples' order.

    """

    def __init__(self, samples: Sequence[Sample], collate: Collate, plan: list[MicroBatchPlan]) -> None:
        self._samples, self._collate = samples, collate
        self.plan = plan

    def __len__(self) -> int:
        return len(self.plan)

    @overload
    def __getitem__(self, index: int) -> MicroBatch: ...
    @overload
    def __getitem__(self, index: slice) -> EvaluationBatches: ...
    def __getitem__(self, index: int | slice) -> MicroBatch | EvaluationBatches:
        if isinstance(index, slice):
            return EvaluationBatches(self._samples, self._collate, self.plan[index])
        slots = self.plan[index]
        return self._collate([self._samples[slot.sample] for slot in slots], [slot.weight for slot in slots])


def evaluation_batches(
    samples: Sequence[Sample], collate: Collate, *, micro_batch_size: int, replica: int = 0, num_replicas: int = 1
) -> EvaluationBatches:
    """The micro-batches with which a replica evaluates its part of the samples.

    The sum of the losses over all micro-batches and replicas, divided by the targets of all samples, is the mean over
    targets.

    Args:
        samples: the same on every rank.
        collate: makes tensors of them.
        micro_batch_size: rows of every micro-batch.
        replica: which data-parallel replica this rank belongs to.
        num_replicas: how many there are.

    Raises:
        DataError: there is no sample.
        ValueError: a number is impossible.

    """
    if not len(samples):
        raise DataError("There is no sample to evaluate.")
    if micro_batch_size < 1 or not 0 <= replica < num_replicas:
        raise ValueError(
            "expected micro_batch_size from 1 and a replica below num_replicas,"
            f" got micro_batch_size={micro_batch_size}, replica={replica}, num_replicas={num_replicas}"
        )
    plan = plan_evaluation(lengths_of(samples), micro_batch_size=micro_batch_size, num_replicas=num_replicas)
    return EvaluationBatches(samples, collate, plan[replica])
