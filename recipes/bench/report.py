"""The results as JSON: all that is needed to check, compare and repeat them."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from avgpipe_ds.memory.breakdown import largest
from bench.measure import Row
from bench.provenance import provenance
from bench.search import Choice
from bench.workload import Workload

__all__ = ["report"]


def report(
    workload: Workload, arguments: Sequence[str], rows: Sequence[Row], choices: Mapping[str, Choice], left_out: Mapping[str, str]
) -> dict[str, Any]:
    """Everything, ready for JSON.

    Args:
        workload: what was trained.
        arguments: the script and its arguments, as in `sys.argv`.
        rows: what was measured.
        choices: by key of the contender, how its M was chosen.
        left_out: by name of the contender, why.
    """
    return {
        "workload": asdict(workload),
        **provenance(arguments, num_accelerators=workload.num_stages),
        "rows": [_row(workload, row, choices[row.contender.key]) for row in rows],
        "left_out": dict(left_out),
    }


def _row(workload: Workload, row: Row, choice: Choice) -> dict[str, Any]:
    found = {
        "key": row.contender.key,
        "name": row.contender.name,
        "num_pipelines": row.contender.num_pipelines,
        "num_micro_batches": row.num_micro_batches,
        "tried": [asdict(trial) for trial in choice.trials],
        "seconds": row.seconds,
        "median_s": row.median_s,
        "min_s": min(row.seconds),
        "max_s": max(row.seconds),
        "speedups": row.speedups,
        "median_speedup": row.median_speedup,
        "min_speedup": min(row.speedups),
        "max_speedup": max(row.speedups),
        "seconds_per_sample": row.median_s / workload.batch,
        "samples_per_second": workload.batch / row.median_s,
        "memory_bytes": largest(row.memory),
        "memory_by_rank": [asdict(memory) for memory in row.memory],
    }
    if workload.mode == "emulated":
        ideal_s = row.contender.compute_s(workload, row.num_micro_batches)
        found |= {"ideal_s": ideal_s, "busy": ideal_s / row.median_s}
    return found
