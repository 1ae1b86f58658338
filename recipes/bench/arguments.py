"""What the command lines of the benchmarks have in common."""

from pathlib import Path
from typing import Annotated, Literal

import torch.distributed as dist
import typer

from bench.layers import Times
from bench.workload import Workload

__all__ = [
    "BatchSize",
    "Batches",
    "Clipping",
    "FixedMs",
    "ForwardMs",
    "InputMs",
    "Length",
    "LocalRank",
    "Mode",
    "Output",
    "Repeats",
    "Warmup",
    "WeightMs",
    "Width",
    "make_workload",
    "parse_numbers",
]

Mode = Annotated[str, typer.Option(help="emulated or real")]
BatchSize = Annotated[int, typer.Option(min=1, help="B: samples that one model trains on per optimizer step")]
FixedMs = Annotated[float, typer.Option(help="emulated: of each pass, however small the micro-batch")]
ForwardMs = Annotated[float, typer.Option(help="emulated: forward, per sample and accelerator")]
InputMs = Annotated[float, typer.Option(help="emulated: gradient of the input, likewise")]
WeightMs = Annotated[float, typer.Option(help="emulated: gradient of the weights, likewise")]
Length = Annotated[int, typer.Option(help="positions of a sample; 0 for 8 emulated, 128 real")]
Width = Annotated[int, typer.Option(help="hidden size; 0 for 64 emulated, 256 real")]
Clipping = Annotated[float, typer.Option(min=0, help="gradient clipping; 0 for none")]
Batches = Annotated[int, typer.Option(min=1, help="batches per timing")]
Repeats = Annotated[int, typer.Option(min=1, help="timings per row")]
Warmup = Annotated[int, typer.Option(min=1, help="iterations before each timing")]
Output = Annotated[Path | None, typer.Option(help="write everything here as JSON")]
LocalRank = Annotated[int, typer.Option("--local_rank", hidden=True)]  # the launcher's


def make_workload(
    mode: Literal["emulated", "real"],
    *,
    batch: int,
    ms: tuple[float, float, float, float],
    length: int,
    width: int,
    clipping: float,
    layers: int = 1,
) -> Workload:
    """The workload that the options describe, over all ranks.

    Args:
        mode: as in `known_mode`.
        batch: B.
        ms: fixed, forward, input and weight, in milliseconds.
        length: positions; 0 for those of the mode.
        width: hidden size, likewise.
        clipping: of gradients.
        layers: transformer layers per chunk.

    """
    fixed_s, forward_s, input_s, weight_s = (value / 1e3 for value in ms)
    emulated = mode == "emulated"
    return Workload(
        mode=mode,
        num_stages=dist.get_world_size(),
        batch=batch,
        length=length or (8 if emulated else 128),
        width=width or (64 if emulated else 256),
        times=Times(fixed_s=fixed_s, forward_s=forward_s, input_gradient_s=input_s, weight_gradient_s=weight_s),
        layers_per_chunk=layers,
        clipping=clipping,
    )


def parse_numbers(text: str, *, option: str, least: int = 1) -> list[int]:
    """`1,2,4` as numbers of an option.

    Raises:
        typer.BadParameter: something in it is no number from `least`.

    """
    numbers = [part.strip() for part in text.split(",")]
    if not all(number.isdigit() and int(number) >= least for number in numbers):
        raise typer.BadParameter(f"{option} is a comma-separated list of numbers from {least}, such as 1,2, got {text!r}")
    return [int(number) for number in numbers]
