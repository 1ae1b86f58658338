"""Measure how many samples training needs to reach an accuracy: N elastic pipelines against DeepSpeed's own engine.

    python recipes/time_to_accuracy.py reference --output reference.jsonl
    deepspeed --num_accelerators 1 recipes/time_to_accuracy.py run reference.jsonl --output runs.jsonl

The reference is one process with transformers and torch alone; the accuracy that it reaches sets the target.
"""

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer
from accuracy.grid import Run, parse_rates, parse_seeds, parse_share, plan
from accuracy.records import Conditions, read_all
from accuracy.settings import REFERENCE, select
from accuracy.target import target_accuracy
from common.errors import RecipeError
from common.narrator import Narrator
from common.session import run_recipe

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

Rates = Annotated[str, typer.Option(help="comma-separated; every setting is trained at each of them")]
Seeds = Annotated[str, typer.Option(help="comma-separated: order of the data, new head, dropout")]
Output = Annotated[Path, typer.Option(help="JSON lines; runs that it has already are not repeated")]


@app.callback()
def launched(local_rank: Annotated[int, typer.Option("--local_rank", hidden=True)] = -1) -> None:
    """Measure how many samples training needs to reach an accuracy."""


@app.command()
def reference(
    output: Output,
    model: Annotated[str, typer.Option(help="a BERT: hub name, folder, or packaged model")] = "minilm",
    dataset: Annotated[str, typer.Option(help="hub name, file, folder or packaged data set")] = "rotten-tomatoes",
    max_length: Annotated[int, typer.Option(help="longest sample, in tokens")] = 48,
    batch_size: Annotated[int, typer.Option(help="B: samples of one batch of one pipeline")] = 16,
    max_samples: Annotated[int, typer.Option(help="samples to train on")] = 4800,
    eval_every: Annotated[int, typer.Option(help="samples between two validations")] = 320,
    warmup_samples: Annotated[int, typer.Option(help="samples over which the learning rate rises")] = 320,
    validation_samples: Annotated[int, typer.Option(help="samples to validate on, the same in all runs")] = 800,
    learning_rates: Rates = "5e-5,1e-4,2e-4",
    seeds: Seeds = "0,1,2",
) -> None:
    """Train without pipelines and without DeepSpeed, and write the curves that set the target."""

    def work(narrator: Narrator) -> None:
        conditions = Conditions(
            model=model,
            dataset=dataset,
            max_length=max_length,
            batch_size=batch_size,
            max_samples=max_samples,
            eval_every=eval_every,
            warmup_samples=warmup_samples,
            validation_samples=validation_samples,
        )
        rates = parse_rates(learning_rates)
        runs = plan([REFERENCE], rates=rates, seeds=parse_seeds(seeds))
        done = {record.key for record in read_all([output])}
        with narrator.phase("importing torch and transformers"):
            import torch
            from accuracy.jobs import run_job
            from accuracy.task import load_task
            from accuracy.torch_trainer import TorchTrainer

        torch.set_num_threads(1)
        task = load_task(conditions, narrator)

        def make_trainer(run: Run) -> TorchTrainer:
            return TorchTrainer(task.initial_model(run.seed), task.data, conditions, learning_rate=run.learning_rate)

        run_job(
            [run for run in runs if run.key not in done],
            make_trainer,
            task.data,
            conditions,
            around=nullcontext,
            output=output,
            target=None,
            narrator=narrator,
        )

    run_recipe(work)


@app.command()
def run(
    references: Annotated[Path, typer.Argument(help="what `reference` wrote; its conditions are taken over")],
    output: Output,
    skip: Annotated[list[Path] | None, typer.Option(help="runs that are in this file are not repeated either")] = None,
    learning_rates: Rates = "5e-5,1e-4,2e-4",
    seeds: Seeds = "0,1,2",
    settings: Annotated[str, typer.Option(help="comma-separated patterns of names, such as 'deepspeed-*,n2-*'")] = "*",
    share: Annotated[str, typer.Option(help="I/J: only the I-th (from 0) of J jobs that share the grid")] = "0/1",
    target: Annotated[float | None, typer.Option(help="accuracy to stop at; default: that of the reference")] = None,
    target_fraction: Annotated[float, typer.Option(help="of the reference's best accuracy")] = 0.98,
    micro_batches: Annotated[int, typer.Option(help="M: micro-batches of one batch")] = 1,
) -> None:
    """Train the settings that are compared, each learning rate and seed, until the target or the end of the budget."""

    def work(narrator: Narrator) -> None:
        found = read_all([references])
        if not found:
            raise RecipeError(f"{references} has no run: write it first, with the command `reference`.")
        stop_at = target_accuracy(found, target_fraction) if target is None else target
        rates = parse_rates(learning_rates)
        runs = plan(select(settings), rates=rates, seeds=parse_seeds(seeds))
        done = {record.key for record in read_all([references, output, *(skip or ())])}
        mine = [run for run in runs[parse_share(share)] if run.key not in done]
        narrator.say(f"{len(mine)} runs to do, of {len(runs)} in the grid; target {stop_at:.4f}")
        with narrator.phase("importing torch, transformers and deepspeed"):
            import torch
            from accuracy.engine_trainer import EngineTrainer, engine_trainer
            from accuracy.jobs import run_job
            from accuracy.process_groups import released_process_groups
            from accuracy.task import load_task

            import avgpipe_ds

        torch.set_num_threads(1)
        avgpipe_ds.init_distributed()
        conditions = found[0].conditions
        task = load_task(conditions, narrator)

        def make_trainer(run: Run) -> EngineTrainer:
            return engine_trainer(
                run.setting,
                task.initial_model(run.seed),
                task.data,
                conditions,
                learning_rate=run.learning_rate,
                num_micro_batches=micro_batches,
            )

        run_job(
            mine,
            make_trainer,
            task.data,
            conditions,
            around=released_process_groups,
            output=output,
            target=stop_at,
            narrator=narrator,
        )

    run_recipe(work)


if __name__ == "__main__":
    app()
