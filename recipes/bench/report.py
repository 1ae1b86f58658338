"""The results as JSON: all that is needed to check, compare and repeat them."""

import os
import platform
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import deepspeed
import torch

import avgpipe_ds
from bench.measure import Row
from bench.memory import largest
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
        "command": _command(workload, arguments),
        "versions": {
            "avgpipe_ds": avgpipe_ds.__version__,
            "torch": torch.__version__,
            "deepspeed": deepspeed.__version__,
            "python": platform.python_version(),
        },
        "machine": {"cpu": _cpu_model(), "cores": os.cpu_count()},
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


def _command(workload: Workload, arguments: Sequence[str]) -> str:
    """The command line, without what the launcher adds."""
    own = [argument for argument in arguments if not argument.startswith("--local_rank")]
    launcher = os.environ.get("AVGPIPE_CLUSTER") or f"deepspeed --num_accelerators {workload.num_stages}"
    return f"{launcher} {shlex.join(own)}"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
