"""Scripts that end in many ways, for `tests.distributed.forks`. Each function is a user's whole script on one rank."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import torch

import avgpipe_ds
from avgpipe_ds.execution import mailbox
from tests.distributed.models import Run, Task

RANK = int(os.environ["RANK"])
SIZE = int(os.environ["WORLD_SIZE"])


def make(num_pipelines: int = 2, num_stages: int = SIZE) -> tuple[Any, Any]:
    """An engine, and endless data."""
    avgpipe_ds.init_distributed(dist_backend="gloo")
    run = Run(task=Task(dropout=0.1), num_stages=num_stages, avgpipe={"num_pipelines": num_pipelines})
    return run.engine(), run.task.data(seed=RANK // num_stages)


def just_ends(num_pipelines: int, num_stages: int, iterations: int, in_flight: bool) -> None:
    """A script that trains and says nothing at the end."""
    engine, data = make(num_pipelines, num_stages)
    if not in_flight:
        data = iter([next(data) for _ in range(iterations * num_pipelines * 4)])
    for _ in range(iterations):
        engine.train_batch(data)


def one_ends_early(early: int, how: str) -> None:
    """Rank `early` leaves after two iterations, while the others go on."""
    engine, data = make()
    for iteration in range(100):
        if RANK == early and iteration == 2:
            if how == "exit":
                sys.exit(3)
            if how == "interrupt":
                raise KeyboardInterrupt
            if how == "raise":
                raise OSError("disk full")
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            return
        engine.train_batch(data)


def one_fails_while_others_wait() -> None:
    """The others wait in a collective of their own, where the engine can't reach them."""
    engine, data = make()
    engine.train_batch(data)
    if RANK == 0:
        raise OSError("disk full")
    torch.distributed.barrier()


def one_is_slow_at_the_end(slow: int, seconds: float) -> None:
    """One rank still saves something when the others are done."""
    engine, data = make()
    engine.train_batch(data)
    if RANK == slow:
        time.sleep(seconds)
    print(f"rank {RANK} is done", flush=True)


def one_fails_in_a_collective_of_deepspeed() -> None:
    """The others wait in a barrier of DeepSpeed's while this rank can't save."""
    mailbox.PATIENCE_S = 1.0
    engine, data = make()
    engine.train_batch(data)
    engine.save_checkpoint(os.environ["TEST_DIRECTORY"], client_state={"state": lambda: 0} if RANK == 1 else {})


def some_fail_before_a_reduction(failing: dict[str, int]) -> None:
    """Ranks fail in the backward of one pipeline, `failing` by rank; the others have begun an all-reduction that will never be
    complete.
    """
    engine, data = make(num_stages=1)
    for iteration in range(3):
        if str(RANK) in failing and iteration == 1:
            next(engine.pipelines[failing[str(RANK)]].module.parameters()).register_hook(fail)
        engine.train_batch(data)


def fail(gradient: torch.Tensor) -> None:
    """A hook that lets the others run ahead before it raises."""
    time.sleep(0.5)
    raise ArithmeticError("no gradient today")


def all_fail_at_once(num_pipelines: int) -> None:
    """Every rank raises in its own user code within the same call."""
    engine, _ = make(num_pipelines)
    engine.train_batch(iter([("not", "a", "pair")]))


def closes_twice() -> None:
    """Two engines one after the other, each closed by hand, twice."""
    for _ in range(2):
        engine, data = make()
        engine.train_batch(data)
        engine.close()
        engine.close()


def closes_after_an_error() -> None:
    """The user catches the error, and builds another engine in the same process."""
    engine, data = make()
    try:
        engine.train_batch(iter([("not", "a", "pair")]) if RANK == 0 else data)
    except Exception as error:  # noqa: BLE001
        print(f"rank {RANK} caught {type(error).__name__}: {error}", flush=True)
    for use in (engine.train_batch, engine.eval_batch):
        try:
            use(data)
        except avgpipe_ds.AvgPipeError as error:
            print(f"rank {RANK} then got {error}", flush=True)
    engine, data = make()
    print(f"rank {RANK} trained again: {float(engine.train_batch(data)):.3f}", flush=True)
