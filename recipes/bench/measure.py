"""Alternated measurement: every repeat times every contender, so what disturbs the machine disturbs all of them."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch.distributed as dist
from common.process_groups import released_process_groups

from avgpipe_ds.memory.breakdown import Breakdown, largest
from avgpipe_ds.memory.saved_tensors import SavedTensors
from bench.contenders.base import Contender
from bench.workload import Workload

__all__ = ["Measured", "Row", "alternate", "measure"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One timing of one contender; the same on every rank.

    Attributes:
        seconds: per B samples.
        memory: by rank.
    """

    seconds: float
    memory: list[Breakdown]


def measure(
    contender: Contender,
    workload: Workload,
    num_micro_batches: int,
    *,
    batches: int,
    warmup: int,
    memory_of_first: bool = False,
) -> Measured:
    """Build a contender, warm it up, time it and take it down again; every rank calls it.

    Each rank times the same number of iterations by itself, and the slowest counts. So what a pipeline needs to fill at the start
    of a timing and to drain at its end is left out, for it is no part of a long training, unless it happens in every iteration.

    Nothing else is alive meanwhile. Engines that wait for their turn would not be idle: see `released_process_groups`.

    Args:
        contender: who.
        workload: what to train.
        num_micro_batches: M, one that the contender has no problem with.
        batches: of B samples to time, in as many iterations as that takes, but in two at least.
        warmup: iterations before; memory is measured in them.
        memory_of_first: whether also in the first of them, in which some find out about shapes, and in which pipelines that begin
            together store more than later.
    """
    iterations = max(2, round(batches / contender.batches_per_iteration))
    with released_process_groups():
        training = contender.build(workload, num_micro_batches)
        try:
            saved = SavedTensors(training.parameters())
            with saved:
                for iteration in range(warmup):
                    training.train_batch()
                    if iteration == 0 and not memory_of_first:
                        saved.restart()
            dist.barrier()
            training.train_batch()  # fills the pipeline again
            start = time.perf_counter()
            for _ in range(iterations):
                training.train_batch()
            seconds = (time.perf_counter() - start) / iterations / contender.batches_per_iteration
            dist.barrier()
            memory = replace(training.memory(), activations=saved.peak_bytes)
        finally:
            training.close()
        del training
    found: list[tuple[float, Breakdown]] = [(seconds, memory)] * dist.get_world_size()
    dist.all_gather_object(found, (seconds, memory))
    return Measured(seconds=max(seconds for seconds, _ in found), memory=[memory for _, memory in found])


@dataclass(kw_only=True)
class Row:
    """What was measured of one contender.

    Attributes:
        contender: who.
        num_micro_batches: M.
        seconds: per B samples, one number per repeat.
        speedups: the first row's seconds in the same repeat, divided by these.
        memory: by rank, of the repeat that needed most.
    """

    contender: Contender
    num_micro_batches: int
    seconds: list[float] = field(default_factory=list)
    speedups: list[float] = field(default_factory=list)
    memory: list[Breakdown] = field(default_factory=list)

    @property
    def median_s(self) -> float:
        """Median of the seconds per B samples."""
        return statistics.median(self.seconds)

    @property
    def median_speedup(self) -> float:
        """Median of the ratios to the first row."""
        return statistics.median(self.speedups)

    def add(self, measured: Measured, baseline_s: float) -> None:
        """Take in a repeat, in which the first row took `baseline_s`."""
        self.seconds.append(measured.seconds)
        self.speedups.append(baseline_s / measured.seconds)
        if not self.memory or largest(measured.memory) > largest(self.memory):
            self.memory = measured.memory


def alternate(
    workload: Workload, rows: Sequence[Row], *, batches: int, repeats: int, warmup: int, say: Callable[[str], None]
) -> Iterator[int]:
    """Fill the rows, and say after each repeat how many there were; every rank calls it.

    Args:
        workload: what to train.
        rows: the first one is what the others are compared with.
        batches: per timing.
        repeats: timings per row.
        warmup: iterations before each.
        say: told what is being done.
    """
    for repeat in range(repeats):
        baseline_s = 0.0
        for row in rows:
            found = measure(row.contender, workload, row.num_micro_batches, batches=batches, warmup=warmup)
            baseline_s = baseline_s or found.seconds
            row.add(found, baseline_s)
            say(f"repeat {repeat + 1} of {repeats}: {row.contender.name}: {found.seconds:.4f} s")
        yield repeat + 1
