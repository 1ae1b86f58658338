"""LoRA with N pipelines: what the weights take, and how fast it is beside DeepSpeed's own pipeline with the same adapters.

    deepspeed --num_accelerators 2 recipes/adapters.py                      # SmolLM2-135M
    deepspeed --num_accelerators 2 recipes/adapters.py --model ./my_llama --rank 16

The frozen weights are there once, however many pipelines train. Contenders take turns, one at a time, on random tokens.
"""

import logging
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated, Any

import deepspeed
import torch
import torch.distributed as dist
import typer
from bench.arguments import Output, check_output, parse_numbers, write_output
from bench.contenders.deepspeed_pipeline import DeepSpeedTraining
from bench.costs import memory_of
from bench.provenance import provenance
from common.medians import median_extremes
from common.models import model_location
from common.process_groups import released_process_groups
from peft import LoraConfig
from rich.console import Console
from rich.table import Table
from torch import Tensor

import avgpipe_ds
from avgpipe_ds import hf

MIB = 1024**2


def main(
    model: Annotated[str, typer.Option(help="a decoder: hub name, folder, or packaged model")] = "smollm2-135m",
    rank: Annotated[int, typer.Option(min=1, help="of the adapters, on all linear layers")] = 8,
    pipelines: Annotated[str, typer.Option(help="comma-separated N")] = "1,2,4",
    micro_batches: Annotated[int, typer.Option(min=1, help="M")] = 4,
    batch: Annotated[int, typer.Option(min=1, help="samples in a micro-batch")] = 1,
    length: Annotated[int, typer.Option(min=2, help="tokens of a sample")] = 64,
    batches: Annotated[int, typer.Option(min=1, help="of one model, that are timed in each repeat")] = 4,
    repeats: Annotated[int, typer.Option(min=1, help="how often everyone takes a turn")] = 3,
    output: Output = None,
    local_rank: Annotated[int, typer.Option("--local_rank", hidden=True)] = -1,
) -> None:
    """Print a table: seconds per batch beside DeepSpeed's, and bytes of the weights of all stages."""
    numbers = parse_numbers(pipelines, option="--pipelines")
    check_output(output)
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    avgpipe_ds.init_distributed()
    location, config = model_location(model), _config(batch, micro_batches)
    rows: dict[int, dict[str, Any]] = {number: {"seconds": [], "memory": None} for number in (0, *numbers)}
    for repeat in range(repeats):
        for number, row in rows.items():
            with released_process_groups():
                seconds, memory = _measure(location, rank, number, config, (batch, length), batches)
            every: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(every, (seconds, memory))
            row["seconds"].append(max(one for one, _ in every))
            row["memory"] = [asdict(one) for _, one in every]
            if dist.get_rank() == 0:
                progress = f"repeat {repeat + 1} of {repeats}: {_name(number)}: {row['seconds'][-1]:.3f} s"
                print(progress, file=sys.stderr, flush=True)
    if dist.get_rank() == 0:
        _print(rows)
        named = {_name(number): row for number, row in rows.items()}
        write_output(output, lambda: {**provenance(sys.argv, num_accelerators=dist.get_world_size()), "rows": named})
    dist.barrier()
    dist.destroy_process_group()


def _config(batch: int, micro_batches: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
    }


def _measure(
    location: str, rank: int, number: int, config: dict[str, Any], size: tuple[int, int], batches: int
) -> tuple[float, Any]:
    """Seconds per batch, and bytes by kind, of N pipelines; N = 0 is DeepSpeed's own."""
    adapters = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    module = hf.to_pipeline(location, num_stages=dist.get_world_size(), task="causal-lm", peft=adapters)
    data = _tokens(size, module.hf_config.vocab_size)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if number:
        engine = avgpipe_ds.initialize(
            model=module,
            model_parameters=trained,
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
            config={**config, "avgpipe": {"num_pipelines": number}},
        )[0]
    else:
        optimizer = torch.optim.AdamW(trained, lr=1e-4)
        engine = deepspeed.initialize(model=module, optimizer=optimizer, model_parameters=trained, config=config)[0]
    iterations = max(2, round(batches / max(1, number)))
    for _ in range(2):
        engine.train_batch(data)
    dist.barrier()
    start = time.perf_counter()
    for _ in range(iterations):
        engine.train_batch(data)
    seconds = (time.perf_counter() - start) / iterations / max(1, number)
    dist.barrier()
    memory = memory_of(engine) if number else DeepSpeedTraining(engine, iter(())).memory()
    engine.close() if number else engine.destroy()
    return seconds, memory


def _tokens(size: tuple[int, int], vocabulary: int) -> Iterator[tuple[tuple[Tensor, Tensor], Tensor]]:
    generator = torch.Generator().manual_seed(0)
    while True:
        ids = torch.randint(0, vocabulary, size, generator=generator)
        yield (ids, torch.ones_like(ids)), ids.clone()


def _print(rows: dict[int, dict[str, Any]]) -> None:
    table = Table("", "s per batch", "times DeepSpeed", "weights, MiB", "/ those of N = 1", title="LoRA, all stages together")
    baseline = statistics.median(rows[0]["seconds"])
    weights = {number: sum(memory["weights"] for memory in row["memory"]) for number, row in rows.items()}
    one = weights.get(1, weights[min(number for number in weights if number)])
    for number, row in rows.items():
        speedup = baseline / statistics.median(row["seconds"])
        table.add_row(
            _name(number),
            "{:.3f} ({:.3f} .. {:.3f})".format(*median_extremes(row["seconds"])),
            f"{speedup:.2f}",
            f"{weights[number] / MIB:.1f}",
            f"{weights[number] / one:.3f}",
        )
    Console(width=120).print(table)


def _name(number: int) -> str:
    return f"N = {number}" if number else "DeepSpeed 1F1B"


if __name__ == "__main__":
    typer.run(main)
