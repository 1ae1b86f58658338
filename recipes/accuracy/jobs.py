"""A job: its runs one after another, each written down as soon as it is finished."""

import platform
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing
from importlib.metadata import version
from pathlib import Path

import torch.distributed as dist
from common.narrator import Narrator
from common.training import TaskData
from transformers import set_seed

from accuracy.grid import Run
from accuracy.records import Conditions, Point, Record, append
from accuracy.trainer import Trainer, train
from avgpipe_ds.data import TrainingBatches

__all__ = ["run_job"]


def run_job(
    runs: Sequence[Run],
    make_trainer: Callable[[Run], Trainer],
    data: TaskData,
    conditions: Conditions,
    *,
    around: Callable[[], AbstractContextManager[None]],
    output: Path,
    target: float | None,
    narrator: Narrator,
) -> None:
    """Train all `runs`, in this order, and append them to `output`. Every rank calls it.

    Args:
        runs: what to train.
        make_trainer: builds a run's trainer.
        data: samples to train and to validate on.
        conditions: budget and validations.
        around: a context for each run, left when nothing of the run is referred to any more.
        output: rank 0 writes there.
        target: the accuracy at which a run may stop; None to use up the budget.
        narrator: says what is being done.

    """
    for number, run in enumerate(runs, start=1):
        narrator.say(f"run {number} of {len(runs)}: {run}")
        narrator.working_on("training")
        with around():
            record = _train(run, make_trainer, data, conditions, target=target, narrator=narrator)
        if narrator.enabled:
            append(output, record)
    narrator.working_on(None)


def _train(
    run: Run,
    make_trainer: Callable[[Run], Trainer],
    data: TaskData,
    conditions: Conditions,
    *,
    target: float | None,
    narrator: Narrator,
) -> Record:
    def say(point: Point) -> None:
        narrator.say(f"  {point.samples} samples: accuracy {point.accuracy:.4f}, loss {point.loss:.4f}")

    begin = time.monotonic()
    set_seed(run.seed)  # dropout; the data and the head have generators of their own
    with closing(make_trainer(run)) as trainer:
        batches = TrainingBatches(
            data.train,
            data.collate,
            trainer.shape,
            seed=run.seed,
            iterations=conditions.max_samples,  # more than enough: validation ends the training
        )
        curve, diverged = train(trainer, batches, conditions, num_samples=len(data.train), target=target, say=say)
        num_micro_batches = trainer.shape.num_micro_batches
    if diverged:
        narrator.say("  diverged")
    return Record(
        setting=run.setting.name,
        learning_rate=run.learning_rate,
        seed=run.seed,
        conditions=conditions,
        num_stages=dist.get_world_size() if dist.is_initialized() else 1,
        num_micro_batches=num_micro_batches,
        stopped_at=target,
        curve=tuple(curve),
        diverged=diverged,
        run_s=round(time.monotonic() - begin, 1),
        versions=_versions(),
    )


def _versions() -> dict[str, str]:
    packages = ("avgpipe-ds", "deepspeed", "torch", "transformers")
    return {"python": platform.python_version(), **{package: version(package) for package in packages}}
