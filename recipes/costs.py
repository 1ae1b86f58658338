"""What N pipelines cost beside their computation: the executor's time, the averaging's share, memory by kind.

    deepspeed --num_accelerators 2 recipes/costs.py                      # MiniLM
    deepspeed --num_accelerators 2 recipes/costs.py --model ./my_bert

The model is trained on random tokens of the size given; its weights do not matter here.
"""

import logging
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from bench.arguments import Output, check_output, parse_numbers, write_output
from bench.costs import Stopwatch, memory_of, saved_bytes, tracing_share, tracing_slowdown
from bench.provenance import provenance
from common.medians import median_extremes, median_interval
from common.models import model_location
from rich.console import Console
from rich.table import Table
from torch import Tensor

import avgpipe_ds
from avgpipe_ds import hf

MIB = 1024**2
KINDS = ("weights", "gradients", "optimizer", "reference", "activations")


def main(
    model: Annotated[str, typer.Option(help="a BERT: hub name, folder, or packaged model")] = "minilm",
    pipelines: Annotated[str, typer.Option(help="comma-separated N")] = "1,2,3",
    micro_batches: Annotated[int, typer.Option(min=1, help="M")] = 4,
    batch: Annotated[int, typer.Option(min=1, help="samples in a micro-batch")] = 4,
    length: Annotated[int, typer.Option(min=2, help="tokens of a sample")] = 128,
    iterations: Annotated[int, typer.Option(min=1, help="timed iterations, three times over")] = 4,
    tracing_pairs: Annotated[int, typer.Option(min=1, help="pairs of iterations with and without a timeline")] = 60,
    output: Output = None,
    local_rank: Annotated[int, typer.Option("--local_rank", hidden=True)] = -1,
) -> None:
    """Print one table of times and one of memory per stage, measured beside predicted."""
    numbers = parse_numbers(pipelines, option="--pipelines")
    check_output(output)
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    avgpipe_ds.init_distributed()
    found = [_measure(model, number, micro_batches, (batch, length), iterations, tracing_pairs) for number in numbers]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, found)
    if dist.get_rank() == 0:
        _print_times(every)
        _print_memory(every)
        write_output(output, lambda: {**provenance(sys.argv, num_accelerators=dist.get_world_size()), "ranks": every})
    dist.barrier()
    dist.destroy_process_group()


def _measure(
    model: str, num_pipelines: int, micro_batches: int, size: tuple[int, int], iterations: int, tracing_pairs: int
) -> dict[str, Any]:
    if dist.get_rank() == 0:
        print(f"measuring N = {num_pipelines}", file=sys.stderr, flush=True)
    stages = dist.get_world_size()
    module = hf.to_pipeline(model_location(model), num_stages=stages, task="sequence-classification", num_labels=5)
    config = {
        "train_micro_batch_size_per_gpu": size[0],
        "gradient_accumulation_steps": micro_batches,
        "steps_per_print": 10**9,
        "avgpipe": {"num_pipelines": num_pipelines},
    }
    engine = avgpipe_ds.initialize(model=module, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-5), config=config)[0]
    data = _tokens(size, module.hf_config.vocab_size)
    engine.train_batch(data)
    watches = []
    for _ in range(3):
        watch = Stopwatch()
        with watch.running():
            for _ in range(iterations):
                engine.train_batch(data)
        watches.append(watch)
    recording = tracing_share(engine, data, iterations=3 * iterations)
    slowdown = tracing_slowdown(engine, data, pairs=tracing_pairs)
    per_micro_batch = saved_bytes(engine, _stage_inputs(engine, size, module.hf_config.hidden_size))
    stored = min(micro_batches, stages - engine.stage_id)
    result = {
        "num_pipelines": num_pipelines,
        "stage": engine.stage_id,
        "iteration_s": statistics.median(w.seconds["run"] / iterations for w in watches),
        "executor_ms": [w.executor_ms for w in watches],
        "executor_cpu_ms": [w.executor_cpu_ms for w in watches],
        "sending_cpu_ms": [w.sending_cpu_ms for w in watches],
        "averaging_share": [w.averaging_share for w in watches],
        "tracing_share": recording,
        "tracing_slowdown": slowdown,
        "memory": asdict(replace(memory_of(engine), activations=num_pipelines * stored * per_micro_batch)),
    }
    engine.close()
    return result


def _tokens(size: tuple[int, int], vocabulary: int) -> Iterator[Any]:
    inputs = (torch.randint(vocabulary, size), torch.ones(size, dtype=torch.int64))
    labels = (torch.randint(5, size[:1]), torch.full(size[:1], 1.0 / size[0]))
    while True:
        yield inputs, labels


def _stage_inputs(engine: Any, size: tuple[int, int], width: int) -> tuple[Tensor, Tensor]:
    mask = torch.ones(size, dtype=torch.int64)
    if engine.is_first_stage():
        return torch.ones(size, dtype=torch.int64), mask
    return torch.randn(*size, width, requires_grad=True), mask


def _print_times(every: list[list[dict[str, Any]]]) -> None:
    title = "medians (min .. max), of the slowdown its 95 % interval; executor: per instruction, sending: per message"
    columns = {
        "executor, wall ms": ("executor_ms", ".3f", median_extremes),
        "executor, CPU ms": ("executor_cpu_ms", ".3f", median_extremes),
        "sending, CPU ms": ("sending_cpu_ms", ".3f", median_extremes),
        "averaging, share of the time": ("averaging_share", ".2%", median_extremes),
        "recorder of timelines, share": ("tracing_share", ".3%", median_extremes),
        "slower with a timeline by": ("tracing_slowdown", ".2%", median_interval),
    }
    table = Table(title=title)
    for name in ("N", "stage", "s per iteration", *columns):
        table.add_column(name, justify="right")
    for found in zip(*every, strict=True):
        for one in found:
            cells = [str(one["num_pipelines"]), str(one["stage"]), f"{one['iteration_s']:.3f}"]
            for key, style, summary in columns.values():
                middle, low, high = summary(one[key])
                cells.append(f"{middle:{style}} ({low:{style}} .. {high:{style}})")
            table.add_row(*cells)
    Console(width=190).print(table)


def _print_memory(every: list[list[dict[str, Any]]]) -> None:
    """Predicted from N = 1: N times what one pipeline has; from N = 2 on the reference and its sum, too."""
    table = Table(title="memory in MiB: measured, and predicted from N = 1")
    for column in ("N", "stage", *KINDS, "all", "predicted"):
        table.add_column(column, justify="right")
    for found in zip(*every, strict=True):
        for one, alone in zip(found, (stage[0] for stage in every), strict=True):
            number, memory, base = one["num_pipelines"], one["memory"], alone["memory"]
            predicted = number * sum(base.values()) + (2 * base["weights"] if number > 1 else 0)
            cells = [str(number), str(one["stage"]), *(f"{memory[kind] / MIB:.1f}" for kind in KINDS)]
            table.add_row(*cells, f"{sum(memory.values()) / MIB:.1f}", f"{predicted / MIB:.1f}")
    Console(width=110).print(table)


if __name__ == "__main__":
    typer.run(main)
