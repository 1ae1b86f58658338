"""How the benchmarks start."""

import logging
import os
import sys
import time
from collections.abc import Callable
from typing import Literal

import torch
import torch.distributed as dist
import typer

import avgpipe_ds

__all__ = ["known_mode", "start"]


def known_mode(text: str) -> Literal["emulated", "real"]:
    """The mode that a user wrote.

    Raises:
        typer.BadParameter: there is no such mode.

    """
    if text == "emulated":
        return "emulated"
    if text == "real":
        return "real"
    raise typer.BadParameter(f"--mode is 'emulated' or 'real', got {text!r}")


def start(mode: str, local_rank: int) -> Callable[[str], None]:
    """Join the other ranks; in real mode take a core. Returns what prints progress, on the first rank."""
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    avgpipe_ds.init_distributed()
    rank = dist.get_rank()
    if dist.get_world_size() < 2:
        raise typer.BadParameter("a pipeline takes at least 2 accelerators, got 1: start with deepspeed --num_accelerators 2")
    if mode == "real" and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[max(rank, local_rank) % len(cores)]})
    begin = time.perf_counter()

    def say(text: str) -> None:
        if rank == 0:
            print(f"[{time.perf_counter() - begin:6.1f} s] {text}", file=sys.stderr, flush=True)

    return say
