"""Alternated measurement: every repeat times every contender, so what disturbs the machine disturbs all of them."""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch.distributed as dist

from bench.contenders import Contender, Workload

__all__ = ["Row", "measure"]


@dataclass
class Row:
    """What was measured of one contender.

    Attributes:
        seconds: per batch of one pipeline, one number per repeat.
        speedups: the first contender's seconds in the same repeat, divided by these.
    """

    name: str
    num_pipelines: int
    seconds: list[float] = field(default_factory=list)
    speedups: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Everything, with medians and spread, for JSON."""
        medians = {"median_s": statistics.median(self.seconds), "median_speedup": statistics.median(self.speedups)}
        return asdict(self) | medians | {"speedup_min": min(self.speedups), "speedup_max": max(self.speedups)}


def measure(
    workload: Workload, rows: list[Contender], *, batches: int, repeats: int, warmup: int, say: Callable[[str], None]
) -> list[Row]:
    """Seconds per batch of every contender; every rank calls it.

    Args:
        workload: what to train.
        rows: the first one is what the others are compared to.
        batches: batches per timing; N pipelines train them in batches / N iterations.
        repeats: timings per contender.
        warmup: iterations before the first timing.
        say: told what is being done.
    """
    engines = []
    for contender in rows:
        say(f"building {contender.name}")
        engine, data = contender.engine(workload), workload.data()
        for _ in range(warmup):
            engine.train_batch(data)
        engines.append((engine, data))
    results = [Row(contender.name, contender.num_pipelines) for contender in rows]
    for repeat in range(repeats):
        for contender, (engine, data), row in zip(rows, engines, results, strict=True):
            say(f"repeat {repeat + 1} of {repeats}: {contender.name}")
            iterations = max(1, round(batches / contender.num_pipelines))
            engine.train_batch(data)  # refills the pipeline after the other contenders' turn
            dist.barrier()
            start = time.perf_counter()
            for _ in range(iterations):
                engine.train_batch(data)
            dist.barrier()
            row.seconds.append((time.perf_counter() - start) / iterations / contender.num_pipelines)
        for row in results:
            row.speedups.append(results[0].seconds[-1] / row.seconds[-1])
    return results
