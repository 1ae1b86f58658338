"""What the commands do, once their options are known. Heavy imports wait until the options have been checked."""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import RecipeError
from common.narrator import Narrator

from accuracy.grid import Run
from accuracy.records import Conditions, read_all

if TYPE_CHECKING:
    from accuracy.engine_trainer import EngineTrainer
    from accuracy.torch_trainer import TorchTrainer

__all__ = ["train_grid", "train_reference", "undone"]


def undone(runs: Sequence[Run], files: Sequence[Path], conditions: Conditions) -> list[Run]:
    """Return the runs that are in none of `files`; files that do not exist yet have none.

    Raises:
        RecipeError: a file has runs of other conditions.

    """
    done = {record.key for record in read_all(files, conditions=conditions)}
    return [run for run in runs if run.key not in done]


def train_reference(runs: Sequence[Run], conditions: Conditions, *, output: Path, narrator: Narrator) -> None:
    """Train `runs` in this process, without DeepSpeed."""
    with narrator.phase("importing torch and transformers"):
        import torch

        from accuracy.jobs import run_job
        from accuracy.task import load_task
        from accuracy.torch_trainer import TorchTrainer

    torch.set_num_threads(1)  # as the engines have it
    task = load_task(conditions, narrator)

    def make_trainer(run: Run) -> "TorchTrainer":
        return TorchTrainer(task.initial_model(run.seed), task.data, conditions, learning_rate=run.learning_rate)

    run_job(runs, make_trainer, task.data, conditions, around=nullcontext, output=output, target=None, narrator=narrator)


def train_grid(
    runs: Sequence[Run],
    conditions: Conditions,
    *,
    num_micro_batches: int,
    output: Path,
    target: float,
    narrator: Narrator,
) -> None:
    """Train `runs` on the launched ranks, each of them a stage. Every rank calls it."""
    for setting in {run.setting.name: run.setting for run in runs}.values():
        batch_size = conditions.batch_size * setting.batch_factor
        if batch_size % num_micro_batches:
            raise RecipeError(
                f"--micro-batches {num_micro_batches} must divide the batch of a pipeline, which has {batch_size} samples in"
                f" {setting.name}: give another M, another --batch-size to `reference`, or leave it out with --settings."
            )
    with narrator.phase("importing torch, transformers and deepspeed"):
        import torch
        from common.process_groups import released_process_groups

        import avgpipe_ds
        from accuracy.engine_trainer import engine_trainer
        from accuracy.jobs import run_job
        from accuracy.task import load_task

    torch.set_num_threads(1)
    task = load_task(conditions, narrator)
    avgpipe_ds.init_distributed()

    def make_trainer(run: Run) -> "EngineTrainer":
        return engine_trainer(
            run.setting,
            task.initial_model(run.seed),
            task.data,
            conditions,
            learning_rate=run.learning_rate,
            num_micro_batches=num_micro_batches,
        )

    run_job(
        runs,
        make_trainer,
        task.data,
        conditions,
        around=released_process_groups,
        output=output,
        target=target,
        narrator=narrator,
    )
