"""Time this project's engine and its rivals on the same model, data and machine, in one run and in alternation.

    deepspeed --num_accelerators 4 recipes/benchmark.py                    # 4 emulated accelerators
    deepspeed --num_accelerators 2 recipes/benchmark.py --mode real        # transformer layers, a core each
    deepspeed --num_accelerators 4 recipes/benchmark.py --contenders torch-zbv,avgpipe-n2 --micro-batches 8

Everyone trains the same samples per optimizer step and slices them as it likes best: with `--micro-batches auto` a short search
chooses each contender's own M. Emulated accelerators hold a stage for a set wall time without using the CPU, so 4 or 8 stages fit
on 2 cores; what is real is everything else: processes, messages, schedules, optimizers, averaging.
"""

import sys
from typing import Annotated

import torch.distributed as dist
import typer
from bench.arguments import (
    Batches,
    BatchSize,
    Clipping,
    FixedMs,
    ForwardMs,
    InputMs,
    Length,
    LocalRank,
    Mode,
    Output,
    Repeats,
    Warmup,
    WeightMs,
    Width,
    check_output,
    make_workload,
    parse_numbers,
    write_output,
)
from bench.contenders import BASELINE, Contender, all_contenders, choose
from bench.measure import Row, alternate, measure
from bench.report import report
from bench.search import Choice, fixed_choice, search
from bench.start import known_mode, start
from bench.table import print_results
from bench.workload import Workload

from avgpipe_ds.config import TraceConfig
from avgpipe_ds.errors import ConfigError
from avgpipe_ds.tracing.window import prepare_directory


def main(
    mode: Mode = "emulated",
    micro_batches: Annotated[str, typer.Option(help="M for everyone, or auto for each contender's own best")] = "auto",
    batch: BatchSize = 32,
    contenders: Annotated[str, typer.Option(help="comma-separated keys, or all; DeepSpeed's pipeline always runs")] = "all",
    pipelines: Annotated[str, typer.Option(help="comma-separated N of avgpipe_ds")] = "1,2,3,4",
    advance: Annotated[int, typer.Option(min=1, help="for the rows with advance forward")] = 1,
    memory_limit_mb: Annotated[float | None, typer.Option(help="per accelerator, for --micro-batches auto")] = None,
    fixed_ms: FixedMs = 2.0,
    forward_ms: ForwardMs = 4.5,
    input_ms: InputMs = 4.5,
    weight_ms: WeightMs = 4.5,
    length: Length = 0,
    width: Width = 0,
    layers: Annotated[int, typer.Option(min=1, help="real: transformer layers in each of the 2 K chunks")] = 1,
    clipping: Clipping = 1.0,
    batches: Batches = 24,
    search_batches: Annotated[int, typer.Option(min=1, help="batches per timing of the search for M")] = 4,
    repeats: Repeats = 5,
    warmup: Warmup = 2,
    output: Output = None,
    trace: Annotated[str | None, typer.Option(help="a folder: timelines of avgpipe_ds, as for a closer look")] = None,
    local_rank: LocalRank = -1,
) -> None:
    """Print a table of seconds per batch, speed-ups over DeepSpeed's pipeline, and memory; medians with spread."""
    which, fixed = known_mode(mode), _number_or_auto(micro_batches)
    if fixed is not None and memory_limit_mb is not None:
        raise typer.BadParameter("--memory-limit-mb bounds the search for M: use it with --micro-batches auto")
    rows = _chosen(contenders, pipelines, advance, trace)
    check_output(output)
    _check_trace(trace)
    say = start(which, local_rank)
    workload = make_workload(
        which,
        batch=batch,
        ms=(fixed_ms, forward_ms, input_ms, weight_ms),
        length=length,
        width=width,
        layers=layers,
        clipping=clipping,
    )
    limit_bytes = None if memory_limit_mb is None else round(memory_limit_mb * 1e6)
    choices = {}
    for row in rows:
        choices[row.key] = _choose_micro_batches(row, workload, fixed, search_batches, warmup, limit_bytes)
        say(f"{row.name}: {_explain(choices[row.key])}")
    left_out = {row.name: choices[row.key].reason for row in rows if choices[row.key].reason}
    if BASELINE.name in left_out:
        raise typer.BadParameter(f"{BASELINE.name}, which all are compared with, can't take part: {left_out[BASELINE.name]}")
    measured = [Row(contender=row, num_micro_batches=m) for row in rows if (m := choices[row.key].num_micro_batches)]
    is_first = dist.get_rank() == 0
    for _ in alternate(workload, measured, batches=batches, repeats=repeats, warmup=warmup, say=say):
        if is_first:  # after each repeat, so that one that is interrupted keeps those before it
            write_output(output, lambda: report(workload, sys.argv, measured, choices, left_out))
    if is_first:
        print_results(workload, measured, left_out)
    dist.barrier()
    dist.destroy_process_group()


def _number_or_auto(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise typer.BadParameter(f"--micro-batches is a number from 1, or 'auto', got {text!r}")
    return int(text)


def _check_trace(folder: str | None) -> None:
    try:
        prepare_directory(None if folder is None else TraceConfig(directory=folder))
    except ConfigError as error:
        raise typer.BadParameter(f"--trace: {error}") from error


def _chosen(keys: str, pipelines: str, advance: int, trace: str | None) -> list[Contender]:
    known = all_contenders(parse_numbers(pipelines, option="--pipelines"), advance, trace=trace)
    try:
        return known if keys == "all" else choose([key.strip() for key in keys.split(",")], known)
    except ValueError as error:
        raise typer.BadParameter(f"--contenders: {error}") from None


def _choose_micro_batches(
    contender: Contender, workload: Workload, fixed: int | None, batches: int, warmup: int, limit_bytes: int | None
) -> Choice:
    if fixed is not None:
        return fixed_choice(contender, workload, fixed)
    return search(
        contender,
        workload,
        lambda number: measure(contender, workload, number, batches=batches, warmup=warmup),
        memory_limit_bytes=limit_bytes,
    )


def _explain(choice: Choice) -> str:
    taken = f"left out: {choice.reason}" if choice.reason else f"M = {choice.num_micro_batches}"
    tried = "; ".join(f"M = {t.num_micro_batches}: {t.note or f'{t.seconds:.3f} s'}" for t in choice.trials)
    return f"{taken} ({tried})" if tried else taken


if __name__ == "__main__":
    typer.run(main)
