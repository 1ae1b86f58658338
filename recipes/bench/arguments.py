"""What the command lines of the benchmarks have in common."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import torch.distributed as dist
import typer

from avgpipe_ds.atomic import replacing
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
    "check_output",
    "make_workload",
    "parse_numbers",
    "write_output",
]

Mode = Annotated[str, typer.Option(help="emulated or real")]
BatchSize = Annotated[int, typer.Option(min=1, help="B: samples that one model trains on per optimizer step")]
FixedMs = Annotated[float, typer.Option(min=0, help="emulated: of each pass, however small the micro-batch")]
ForwardMs = Annotated[float, typer.Option(min=0, help="emulated: forward, per sample and accelerator")]
InputMs = Annotated[float, typer.Option(min=0, help="emulated: gradient of the input, likewise")]
WeightMs = Annotated[float, typer.Option(min=0, help="emulated: gradient of the weights, likewise")]
Length = Annotated[int, typer.Option(min=0, help="positions of a sample; 0 for 8 emulated, 128 real")]
Width = Annotated[int, typer.Option(min=0, help="hidden size; 0 for 64 emulated, 256 real")]
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


def check_output(file: Path | None) -> None:
    """Found before the measurement, not after it.

    Raises:
        typer.BadParameter: `file` can't be written.

    """
    if file is not None and (file.is_dir() or not os.access(file.parent, os.W_OK)):
        raise typer.BadParameter(f"--output {file}: there is no folder {file.parent} to write that file to")


def write_output(file: Path | None, found: Callable[[], Mapping[str, Any]]) -> None:
    """Write what was found as JSON, whole or not at all; nothing without a file."""
    if file is not None:
        with replacing(file) as part:
            part.write_text(json.dumps(found(), indent=2))


def parse_numbers(text: str, *, option: str, least: int = 1) -> list[int]:
    """`1,2,4` as numbers of an option, each once.

    Raises:
        typer.BadParameter: something in it is no number from `least`.

    """
    numbers = [part.strip() for part in text.split(",")]
    if not all(number.isdecimal() and int(number) >= least for number in numbers):
        raise typer.BadParameter(f"{option} is a comma-separated list of numbers from {least}, such as 1,2, got {text!r}")
    return list(dict.fromkeys(map(int, numbers)))
