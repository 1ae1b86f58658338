"""The configuration that an engine gets: what the arguments say, and beside it what the user's own file says.

As in transformers, a value of the file that an argument says too is either the same or "auto". Anything else is a mistake in one
of the two, and taking sides would train something that the user can't see.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from avgpipe_ds import deepspeed_compat as compat
from avgpipe_ds.config import BLOCK
from avgpipe_ds.errors import ConfigError
from avgpipe_ds.trainer.arguments import PipelineTrainingArguments

__all__ = ["deepspeed_config"]

_AUTO = "auto"
_MONITOR_BLOCKS = {"tensorboard": "tensorboard", "wandb": "wandb", "csv": "csv_monitor", "comet": "comet"}
_WITH_FOLDER = ("tensorboard", "csv_monitor")

Path = tuple[str, ...]


def deepspeed_config(args: PipelineTrainingArguments, *, num_replicas: int) -> dict[str, Any]:
    """DeepSpeed's configuration, with the "avgpipe" block.

    Args:
        args: with more of the configuration in `deepspeed`, a file or a dictionary.
        num_replicas: data-parallel replicas of each pipeline.

    Raises:
        ConfigError: the file can't be read, or contradicts the arguments; with both values of every contradiction.

    """
    config = _read(args.deepspeed)
    is_adam = "adam" in str(_at(config, ("optimizer", "type")) or "AdamW").lower()
    problems = ["scheduler: expected none, for lr_scheduler_type makes it: remove it"] if "scheduler" in config else []
    for path, value in _flat(_said(args, num_replicas) | {"optimizer": {"params": _optimizer(args, is_adam=is_adam)}}):
        problems += _agree(config, path, value)
    problems += [
        f'{".".join(path)} is "auto", but no argument says what it is: give a value or remove it'
        for path, value in _flat(config)
        if value == _AUTO and path[0] != BLOCK
    ]
    if problems:
        found = "\n  ".join(problems)
        raise ConfigError(f"the arguments and the DeepSpeed configuration do not go together, make them the same:\n  {found}")
    config["optimizer"].setdefault("type", "AdamW")
    if is_adam:  # DeepSpeed's own has to be compiled first: minutes, and a compiler
        config["optimizer"]["params"].setdefault("torch_adam", True)
    config.setdefault("steps_per_print", None)  # the trainer logs
    return config


def _read(source: Mapping[str, Any] | str | None) -> dict[str, Any]:
    """A configuration of its own.

    Raises:
        ConfigError: it can't be read.

    """
    try:
        return copy.deepcopy(compat.load_config(None, source or {}, None))
    except (OSError, ValueError) as error:
        raise ConfigError(f"deepspeed={source!r} is no configuration: {error}") from error


def _said(args: PipelineTrainingArguments, num_replicas: int) -> dict[str, Any]:
    """What the arguments say, but for the optimizer."""
    block = {"num_pipelines": args.num_pipelines, "partition": args.partition}
    monitors: dict[str, Any] = {_MONITOR_BLOCKS[name]: {"enabled": True} for name in args.report_to}
    for name in _WITH_FOLDER:
        if name in monitors:
            monitors[name] |= {"output_path": args.output_dir, "job_name": "runs"}
    return {
        "train_batch_size": args.per_device_train_batch_size * args.gradient_accumulation_steps * num_replicas,
        "train_micro_batch_size_per_gpu": args.per_device_train_batch_size,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "gradient_clipping": args.max_grad_norm,
        "bf16": {"enabled": args.bf16},
        BLOCK: {name: value for name, value in block.items() if value is not None},
        **monitors,
    }


def _optimizer(args: PipelineTrainingArguments, *, is_adam: bool) -> dict[str, Any]:
    """Parameters that the arguments say; those of Adam only for an Adam."""
    adam = {"betas": [args.adam_beta1, args.adam_beta2], "eps": args.adam_epsilon} if is_adam else {}
    return {"lr": args.learning_rate, "weight_decay": args.weight_decay, **adam}


def _flat(settings: Mapping[str, Any], prefix: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every value that is no object, with its keys."""
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, (*prefix, key))
        else:
            yield (*prefix, key), value


def _at(config: Mapping[str, Any], path: Path) -> Any:
    """The value there; None if there is none."""
    found: Any = config
    for key in path:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def _agree(config: dict[str, Any], path: Path, value: Any) -> list[str]:
    """Put a value where there is none or "auto". Returns the problem if there is another."""
    inside: Any = config
    for key in path[:-1]:
        inside = inside.setdefault(key, {})
        if not isinstance(inside, dict):
            return [f"{key}: expected an object with {path[-1]!r}, got {inside!r}"]
    name, key = ".".join(path), path[-1]
    fills = _AUTO if path[0] != BLOCK else None  # "auto" is a value there
    there = inside.get(key, fills)
    if there not in (fills, value) and not (isinstance(there, tuple) and list(there) == value):
        return [f"{name}: the arguments say {value!r}, the configuration says {there!r}"]
    inside[key] = value
    return []
