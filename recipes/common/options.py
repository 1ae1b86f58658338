"""The command line of a recipe.

Beside the recipe's own options it takes what the stock launcher passes (`--local_rank`) and what
`deepspeed.add_config_arguments` would add (`--deepspeed`, `--deepspeed_config`). They are declared here, rather than
by that function, so that `--help` and a wrong argument do not wait ten seconds for `import deepspeed`.
"""

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from common.errors import RecipeError

__all__ = ["DataOptions", "RecipeDefaults", "RecipeOptions", "parse_options"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataOptions:
    """Where the texts come from."""

    dataset: str
    subset: str | None = None
    text_column: str | None = None
    label_column: str | None = None
    validation_fraction: float = 0.2

    def __post_init__(self) -> None:
        if not 0 < self.validation_fraction < 1:
            raise RecipeError(f"--validation-fraction must lie between 0 and 1, got {self.validation_fraction}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeOptions:
    """Everything else that a recipe is told; the optimizer, the batch sizes and the averaging are in the JSON file."""

    deepspeed_config: str
    model: str
    stages: int
    epochs: int
    steps: int | None
    max_length: int
    seed: int
    eval_every: int
    eval_micro_batch_size: int
    max_validation_samples: int | None
    activation_checkpoint_interval: int
    save_dir: str | None
    save_every: int
    resume: bool
    output_dir: str | None

    def __post_init__(self) -> None:
        if not Path(self.deepspeed_config).is_file():
            raise RecipeError(f"--deepspeed_config {self.deepspeed_config}: there is no such file.")
        smallest = {"stages": 1, "epochs": 1, "steps": 1, "max_length": 2, "eval_every": 0, "eval_micro_batch_size": 1}
        smallest |= {"max_validation_samples": 1, "save_every": 0, "activation_checkpoint_interval": 0}
        for name, lowest in smallest.items():
            value = getattr(self, name)
            if value is not None and value < lowest:
                raise RecipeError(f"--{name.replace('_', '-')} must be at least {lowest}, got {value}.")
        world_size = int(os.environ.get("WORLD_SIZE", self.stages))
        if world_size % self.stages:
            raise RecipeError(f"--stages {self.stages} must divide the {world_size} processes that were started.")
        for name in ("save_dir", "output_dir"):
            _check_writable(name, getattr(self, name))
        if (self.resume or self.save_every) and self.save_dir is None:
            raise RecipeError("--resume and --save-every need --save-dir, the folder with the checkpoints.")


def _check_writable(name: str, folder: str | None) -> None:
    """Better now than after the training that was to be kept there."""
    try:
        if folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK):
                raise PermissionError("not writable")
    except OSError as error:
        raise RecipeError(f"--{name.replace('_', '-')} {folder}: can't write there: {error}.") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeDefaults:
    """What differs from recipe to recipe."""

    description: str
    model: str
    dataset: str
    deepspeed_config: str
    max_length: int
    validation_fraction: float
    max_validation_samples: int | None
    epochs: int = 1
    labelled: bool = True


def parse_options(defaults: RecipeDefaults, argv: Sequence[str] | None = None) -> tuple[RecipeOptions, DataOptions]:
    """Parse `argv` (the process's own arguments when None).

    Raises:
        RecipeError: a value is impossible. Unknown arguments end the process with argparse's usual message.

    """
    values = vars(_parser(defaults).parse_args(argv))
    recipe, data = (
        {field.name: values[field.name] for field in fields(kind) if field.name in values}
        for kind in (RecipeOptions, DataOptions)
    )
    return RecipeOptions(**recipe), DataOptions(**data)


def _parser(defaults: RecipeDefaults) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=defaults.description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    _add_model_and_data(parser, defaults)
    _add_run(parser, defaults)
    _add_launcher(parser, defaults)
    return parser


def _add_model_and_data(parser: argparse.ArgumentParser, defaults: RecipeDefaults) -> None:
    group = parser.add_argument_group("model and data")
    group.add_argument(
        "--model",
        default=defaults.model,
        help="hub name, local Hugging Face folder, or packaged: minilm, smollm2-135m, gpt2-bytes",
    )
    packaged = "bbc-news, rotten-tomatoes, 20newsgroups" if defaults.labelled else "python-stdlib, kjv-bible"
    group.add_argument(
        "--dataset",
        default=defaults.dataset,
        help=f"hub name, local csv/tsv/json/jsonl/parquet/txt file or folder, or packaged: {packaged}",
    )
    group.add_argument("--subset", help="configuration of a hub data set, such as sst2 of glue")
    group.add_argument("--text-column", help="column with the text; guessed from the usual names")
    if defaults.labelled:
        group.add_argument("--label-column", help="column with the class; guessed from the usual names")
    group.add_argument(
        "--validation-fraction",
        type=float,
        default=defaults.validation_fraction,
        help="held out where the data set has no validation part",
    )
    group.add_argument(
        "--max-validation-samples",
        type=int,
        default=defaults.max_validation_samples,
        help="validate on a sample of at most this many",
    )
    group.add_argument("--max-length", type=int, default=defaults.max_length, help="longest sample, in tokens")


def _add_run(parser: argparse.ArgumentParser, defaults: RecipeDefaults) -> None:
    group = parser.add_argument_group("run")
    group.add_argument("--stages", type=int, default=2, help="pipeline stages, one accelerator each")
    group.add_argument("--epochs", type=int, default=defaults.epochs, help="times through the training data")
    group.add_argument(
        "--steps", type=int, help="iterations to train, instead of --epochs; each trains one batch of every pipeline"
    )
    group.add_argument("--seed", type=int, default=0, help="order of the data, dropout and new weights")
    group.add_argument("--eval-every", type=int, default=0, help="iterations between validations; 0: only at the end")
    group.add_argument("--eval-micro-batch-size", type=int, default=16, help="samples of one micro-batch of a validation")
    group.add_argument(
        "--activation-checkpoint-interval", type=int, default=0, help="layers recomputed together; 0: keep all activations"
    )
    group.add_argument("--save-dir", help="folder for checkpoints; one is written at the end")
    group.add_argument("--save-every", type=int, default=0, help="iterations between checkpoints; 0: only at the end")
    group.add_argument("--resume", action="store_true", help="continue from the newest checkpoint in --save-dir, if there is one")
    group.add_argument("--output-dir", help="folder for the trained model in Hugging Face format")


def _add_launcher(parser: argparse.ArgumentParser, defaults: RecipeDefaults) -> None:
    group = parser.add_argument_group("DeepSpeed")
    group.add_argument(
        "--deepspeed_config", "--deepspeed-config", default=defaults.deepspeed_config, help="DeepSpeed's JSON file"
    )
    group.add_argument("--deepspeed", action="store_true", help="accepted for habit's sake; the engine is always used")
    group.add_argument("--local_rank", "--local-rank", type=int, default=-1, help="passed by the launcher")
