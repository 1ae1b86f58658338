"""Time N elastic pipelines against DeepSpeed's own pipeline engine, in one run and in alternation.

    deepspeed --num_accelerators 4 recipes/benchmark.py --micro-batches 8                # 4 emulated accelerators
    deepspeed --num_accelerators 2 recipes/benchmark.py --mode real --micro-batches 4    # transformer layers, a core each

Emulated accelerators hold a stage for a set wall time without using the CPU, so 4 or 8 stages fit on 2 cores; what is real is
everything else: processes, messages, schedules, optimizers, averaging.
"""

import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from bench.contenders import Workload, contenders
from bench.measure import Row, measure
from rich.console import Console
from rich.table import Table

import avgpipe_ds


def main(
    mode: Annotated[str, typer.Option(help="emulated or real")] = "emulated",
    micro_batches: Annotated[int, typer.Option(help="M")] = 8,
    pipelines: Annotated[str, typer.Option(help="comma-separated N")] = "1,2,3",
    advance: Annotated[int, typer.Option(help="for the row with advance forward")] = 1,
    forward_ms: Annotated[float, typer.Option(help="emulated forward of one micro-batch")] = 20.0,
    backward_ms: Annotated[float, typer.Option(help="emulated backward of one micro-batch")] = 40.0,
    batch: Annotated[int, typer.Option(help="samples in a micro-batch")] = 4,
    length: Annotated[int, typer.Option(help="positions of a sample")] = 0,
    width: Annotated[int, typer.Option(help="hidden size")] = 0,
    layers: Annotated[int, typer.Option(help="transformer layers per stage, in real mode")] = 3,
    clipping: Annotated[float, typer.Option(help="gradient clipping; 0 for none")] = 1.0,
    batches: Annotated[int, typer.Option(help="batches per timing")] = 24,
    repeats: Annotated[int, typer.Option(help="timings per row")] = 5,
    warmup: Annotated[int, typer.Option(help="iterations before timing")] = 2,
    output: Annotated[Path | None, typer.Option(help="write everything here as JSON")] = None,
    local_rank: Annotated[int, typer.Option("--local_rank", hidden=True)] = -1,
) -> None:
    """Print a table of seconds per batch and of speed-ups over DeepSpeed's engine, medians with spread."""
    if mode not in ("emulated", "real"):
        raise typer.BadParameter(f"--mode is 'emulated' or 'real', got {mode!r}")
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    avgpipe_ds.init_distributed()
    rank, stages = dist.get_rank(), dist.get_world_size()
    if mode == "real" and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[max(rank, local_rank) % len(cores)]})
    shape = (batch, length or (8 if mode == "emulated" else 128), width or (64 if mode == "emulated" else 256))
    workload = Workload(mode, stages, micro_batches, shape, forward_ms / 1e3, backward_ms / 1e3, layers, clipping)
    start = time.perf_counter()

    def say(text: str) -> None:
        if rank == 0:
            print(f"[{time.perf_counter() - start:6.1f} s] {text}", file=sys.stderr, flush=True)

    rows = contenders([int(number) for number in pipelines.split(",")], advance)
    results = measure(workload, rows, batches=batches, repeats=repeats, warmup=warmup, say=say)
    if rank == 0:
        _print(workload, results)
        if output is not None:
            report = {"workload": workload.__dict__, "torch": torch.__version__, "rows": [row.summary() for row in results]}
            output.write_text(json.dumps(report, indent=2))


def _print(workload: Workload, results: list[Row]) -> None:
    table = Table(
        title=f"{workload.mode}, K = {workload.num_stages}, M = {workload.num_micro_batches}, clipping {workload.clipping}"
    )
    for column in ("engine", "s per batch", "speed-up", "min .. max"):
        table.add_column(column, justify="left" if column == "engine" else "right")
    busy_s = workload.num_micro_batches * (workload.forward_s + workload.backward_s)
    if workload.mode == "emulated":
        table.add_column("busy", justify="right")
    for row in results:
        found = row.summary()
        cells = [row.name, f"{found['median_s']:.4f}", f"{found['median_speedup']:.3f}"]
        cells.append(f"{found['speedup_min']:.3f} .. {found['speedup_max']:.3f}")
        if workload.mode == "emulated":
            cells.append(f"{busy_s / found['median_s']:.0%}")
        table.add_row(*cells)
    Console(width=100).print(table)


if __name__ == "__main__":
    typer.run(main)
