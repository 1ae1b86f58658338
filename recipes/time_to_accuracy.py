"""Measure how many samples training needs to reach an accuracy: N elastic pipelines against DeepSpeed's own engine.

    python recipes/time_to_accuracy.py reference --output reference.jsonl
    deepspeed --num_accelerators 1 recipes/time_to_accuracy.py run reference.jsonl --output runs.jsonl
    python recipes/time_to_accuracy.py summarise reference.jsonl runs.jsonl --plot curves.png

The reference is one process with transformers and torch alone; the accuracy that it reaches sets the target. The number of stages
does not change what a sample teaches, so one stage is enough. With more, `run` uses them all, but DeepSpeed's engine then clips
by the gradients of its first stage only. Samples that a setting needs may be combined with speeds from any test bed.
"""

import json
from pathlib import Path
from typing import Annotated

import typer
from accuracy.analysis import BASE, attempts, compare
from accuracy.commands import train_grid, train_reference, undone
from accuracy.grid import parse_rates, parse_seeds, parse_share, plan
from accuracy.plot import plot
from accuracy.records import Conditions, ensure_writable, read_all
from accuracy.report import as_json, comparison_table, read_speeds, reference_table, remarks
from accuracy.settings import REFERENCE, select
from accuracy.target import reference_accuracy, target_accuracy
from common.errors import RecipeError
from common.narrator import Narrator
from common.session import run_recipe
from rich.console import Console

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

Rates = Annotated[str, typer.Option(help="comma-separated; every setting is trained at each of them")]
Seeds = Annotated[str, typer.Option(help="comma-separated: order of the data, new head, dropout")]
Output = Annotated[Path, typer.Option(help="JSON lines; runs that it has already are not repeated")]

Settings = Annotated[str, typer.Option(help="comma-separated patterns of names, such as 'deepspeed-*,n2-*'")]
Target = Annotated[float | None, typer.Option(min=0, max=1, help="accuracy; default: a fraction of the reference's")]
TargetFraction = Annotated[float, typer.Option(min=0, max=1, help="of the reference's best accuracy")]


@app.callback()
def launched(local_rank: Annotated[int, typer.Option("--local_rank", hidden=True)] = -1) -> None:
    """Measure how many samples training needs to reach an accuracy."""


@app.command()
def reference(
    output: Output,
    model: Annotated[str, typer.Option(help="a BERT: hub name, folder, or packaged model")] = "minilm",
    dataset: Annotated[str, typer.Option(help="hub name, file, folder or packaged data set")] = "rotten-tomatoes",
    max_length: Annotated[int, typer.Option(min=2, help="longest sample, in tokens")] = 48,
    batch_size: Annotated[int, typer.Option(min=1, help="B: samples of one batch of one pipeline")] = 16,
    max_samples: Annotated[int, typer.Option(min=1, help="samples to train on")] = 4800,
    eval_every: Annotated[int, typer.Option(min=1, help="samples between two validations")] = 320,
    warmup_samples: Annotated[int, typer.Option(min=0, help="samples over which the learning rate rises")] = 320,
    validation_samples: Annotated[int, typer.Option(min=1, help="samples to validate on, the same in all runs")] = 800,
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
        ensure_writable(output, option="--output")
        runs = plan([REFERENCE], rates=parse_rates(learning_rates), seeds=parse_seeds(seeds))
        train_reference(undone(runs, [output], conditions), conditions, output=output, narrator=narrator)

    run_recipe(work)


@app.command()
def run(
    references: Annotated[
        Path, typer.Argument(exists=True, dir_okay=False, help="what `reference` wrote; its conditions are taken over")
    ],
    output: Output,
    skip: Annotated[list[Path] | None, typer.Option(help="runs that are in this file are not repeated either")] = None,
    learning_rates: Rates = "5e-5,1e-4,2e-4",
    seeds: Seeds = "0,1,2",
    settings: Settings = "*",
    share: Annotated[str, typer.Option(help="I/J: only the I-th (from 0) of J jobs that share the grid")] = "0/1",
    target: Target = None,
    target_fraction: TargetFraction = 0.98,
    micro_batches: Annotated[int, typer.Option(min=1, help="M: micro-batches of one batch")] = 1,
) -> None:
    """Train the settings that are compared, each learning rate and seed, until the target or the end of the budget."""

    def work(narrator: Narrator) -> None:
        found = read_all([references])
        if not found:
            raise RecipeError(f"{references} has no run: write it first, with the command `reference`.")
        stop_at = target_accuracy(found, target_fraction) if target is None else target
        grid = plan(select(settings), rates=parse_rates(learning_rates), seeds=parse_seeds(seeds))
        conditions = found[0].conditions
        ensure_writable(output, option="--output")
        runs = undone(grid[parse_share(share)], [output, *(skip or ())], conditions)
        narrator.say(f"{len(runs)} runs to do, of {len(grid)} in the grid; target {stop_at:.4f}")
        train_grid(runs, conditions, num_micro_batches=micro_batches, output=output, target=stop_at, narrator=narrator)

    run_recipe(work)


@app.command()
def summarise(
    files: Annotated[list[Path], typer.Argument(exists=True, dir_okay=False, help="what `reference` and `run` wrote")],
    target: Target = None,
    target_fraction: TargetFraction = 0.98,
    settings: Settings = "*",
    every_rate: Annotated[
        bool, typer.Option("--every-rate", help="a line for each learning rate, not only for the best")
    ] = False,
    seconds_per_sample: Annotated[
        Path | None, typer.Option(help='JSON of measured speeds: {"deepspeed-1f1b": 0.021, "avgpipe-n2": 0.012}')
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="write everything here")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="draw the curves here: png, svg or pdf")] = None,
) -> None:
    """Say how many samples each setting needed, against DeepSpeed with one batch; with measured speeds, how long that takes.

    What a sample teaches does not depend on the machine, so the samples may be combined with the speeds of any test bed.
    """

    def work(narrator: Narrator) -> None:
        for file, option in ((json_file, "--json"), (plot_file, "--plot")):
            if file is not None:
                ensure_writable(file, option=option)
        names = {setting.name for setting in (REFERENCE, *select(settings))}
        every = read_all(files)
        records = [record for record in every if record.setting in names or settings == "*"]
        if not records:
            raise RecipeError(f"There is no run in {', '.join(map(str, files))}.")
        goal = target_accuracy(records, target_fraction) if target is None else target
        base = [record for record in every if record.setting == BASE and BASE not in names]  # compared with, not shown
        tried = attempts([*records, *base], goal)
        rows = [row for row in compare(tried, every_rate=every_rate) if row.attempt.setting in names]
        speeds = {} if seconds_per_sample is None else read_speeds(seconds_per_sample)
        conditions = records[0].conditions
        console = Console(width=170)
        console.print(reference_table(reference_accuracy(records), goal), comparison_table(rows, speeds))
        console.print(*remarks(conditions, goal), sep="\n")
        if json_file is not None:
            summary = as_json(rows, speeds, conditions=conditions, target=goal)
            json_file.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        if plot_file is not None:
            plot(plot_file, [row.attempt for row in rows], records, goal)

    run_recipe(work)


if __name__ == "__main__":
    app()
