"""Which samples each pipeline, replica and micro-batch trains on, and with which weight. Pure.

An iteration takes the next N * D * M * micro_batch_size samples of the epoch's order: a run for every pipeline, in it a
run for every data-parallel replica, in it a run for every micro-batch. The last iteration of an epoch has fewer. Dropping
its samples would mean that they are not trained; giving it smaller batches would mean that some micro-batches are empty,
which a pipeline cannot run. So:

- the samples that are left are spread evenly over the pipelines, and in a pipeline evenly over its micro-batches;
- a micro-batch is filled up with copies of real samples that weigh 0;
- the weights make the mean over a pipeline's micro-batches (and replicas) the mean over its real targets:
  `weight = M * D / targets of the pipeline's batch`. A full batch needs no other formula;
- where fewer samples than pipelines are left, pipelines share them: a pipeline without any takes one that another
  pipeline trains as well, at full weight. Each pipeline must take its optimizer step, and a step on nothing would let
  Adam's momentum and the weight decay run on. It is the one case in which an epoch has a sample twice.

Everything follows from the seed, the epoch and the number of the iteration, so every rank plans the same, and a run that resumes
continues with what would have come next. Nothing but these numbers has to be stored.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

__all__ = ["BatchShape", "MicroBatchPlan", "Position", "Slot", "epoch_order", "order_by_length", "plan_iteration", "position_of"]

#: Micro-batches' worth of samples within which samples of like length are put together.
_WINDOW = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """How many samples an iteration takes, and how they are divided."""

    num_pipelines: int
    num_replicas: int
    num_micro_batches: int
    micro_batch_size: int

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    @classmethod
    def of(cls, engine: Any) -> BatchShape:
        """How an engine divides an iteration, ours or DeepSpeed's own."""
        return cls(
            num_pipelines=getattr(engine, "num_pipelines", 1),
            num_replicas=engine.grid.get_data_parallel_world_size(),
            num_micro_batches=engine.gradient_accumulation_steps(),
            micro_batch_size=engine.train_micro_batch_size_per_gpu(),
        )

    @property
    def micro_batches_per_iteration(self) -> int:
        """Micro-batches that a replica is given for all pipelines."""
        return self.num_pipelines * self.num_micro_batches

    @property
    def samples_per_pipeline(self) -> int:
        """Samples of one pipeline's batch, over all replicas."""
        return self.num_replicas * self.num_micro_batches * self.micro_batch_size

    @property
    def samples_per_iteration(self) -> int:
        """Samples of all pipelines' batches."""
        return self.num_pipelines * self.samples_per_pipeline

    def iterations_per_epoch(self, num_samples: int) -> int:
        """Count the iterations that train `num_samples` samples once, the last of them possibly uneven."""
        return -(-num_samples // self.samples_per_iteration)


class Slot(NamedTuple):
    """One row of a micro-batch: a sample's number in the data set, and its weight (0: it only fills up)."""

    sample: int
    weight: float


class Position(NamedTuple):
    """The next iteration to train: epoch, and iteration within it."""

    epoch: int
    iteration: int


#: A micro-batch, the micro-batches of a replica, the replicas of a pipeline, the pipelines of an iteration.
MicroBatchPlan = list[Slot]
IterationPlan = list[list[list[MicroBatchPlan]]]


def position_of(iteration: int, num_samples: int, shape: BatchShape) -> Position:
    """Return where in which epoch the `iteration`-th iteration of a run (from 0) is."""
    return Position(*divmod(iteration, shape.iterations_per_epoch(num_samples)))


def epoch_order(num_samples: int, *, seed: int, epoch: int) -> list[int]:
    """Return a permutation of the samples that follows from the arguments: every rank, and a resumed run, draws the same."""
    order = list(range(num_samples))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


def order_by_length(lengths: Sequence[int], micro_batch_size: int, *, seed: int, epoch: int) -> list[int]:
    """Return such a permutation in which the samples of a micro-batch are of like length, so that little is computed for padding.

    The shuffled samples are sorted by length within windows of 64 micro-batches, then cut into micro-batches, and these are
    shuffled. A last one that is not full stays last, since it would displace those behind it.
    """
    order = epoch_order(len(lengths), seed=seed, epoch=epoch)
    size = _WINDOW * micro_batch_size
    ordered: list[int] = []
    for start in range(0, len(order), size):
        ordered += sorted(order[start : start + size], key=lambda sample: lengths[sample])
    micro_batches = [ordered[start : start + micro_batch_size] for start in range(0, len(ordered), micro_batch_size)]
    rest = micro_batches.pop() if len(ordered) % micro_batch_size else []
    random.Random(f"{seed}/{epoch}/micro-batches").shuffle(micro_batches)
    return [sample for micro_batch in micro_batches for sample in micro_batch] + rest


def plan_iteration(order: Sequence[int], num_targets: Sequence[int], shape: BatchShape, iteration: int) -> IterationPlan:
    """Return the slots `[pipeline][replica][micro-batch][row]` of one iteration of an epoch.

    Args:
        order: the epoch's order of the samples.
        num_targets: for every sample of the data set, how many targets its loss sums over (1 for classification).
        shape: the division.
        iteration: which iteration of the epoch, from 0.

    """
    start = iteration * shape.samples_per_iteration
    samples = order[start : start + shape.samples_per_iteration]
    if not samples:
        raise ValueError(f"iteration {iteration} lies behind the end of an epoch of {len(order)} samples")
    runs = _runs(samples, shape.num_pipelines)
    return [_plan_pipeline(run or [samples[i % len(samples)]], num_targets, shape) for i, run in enumerate(runs)]


def _plan_pipeline(samples: Sequence[int], num_targets: Sequence[int], shape: BatchShape) -> list[list[MicroBatchPlan]]:
    num_micro_batches = shape.num_replicas * shape.num_micro_batches
    weight = num_micro_batches / sum(num_targets[sample] for sample in samples)
    micro_batches = [
        _fill_up(run, filler=samples, size=shape.micro_batch_size, weight=weight) for run in _runs(samples, num_micro_batches)
    ]
    return [
        micro_batches[start : start + shape.num_micro_batches] for start in range(0, num_micro_batches, shape.num_micro_batches)
    ]


def _fill_up(samples: Sequence[int], *, filler: Sequence[int], size: int, weight: float) -> MicroBatchPlan:
    """Weigh the samples; fill up with copies of them, or of the pipeline's others where the micro-batch has none."""
    copies = samples or filler
    real = [Slot(sample, weight) for sample in samples]
    return real + [Slot(copies[row % len(copies)], 0.0) for row in range(size - len(real))]


def _runs(samples: Sequence[int], parts: int) -> list[Sequence[int]]:
    """Cut `samples` into `parts` runs whose lengths differ by one at most, the longer ones first."""
    length, longer = divmod(len(samples), parts)
    ends = [part * length + min(part, longer) for part in range(parts + 1)]
    return [samples[start:end] for start, end in zip(ends, ends[1:], strict=False)]
