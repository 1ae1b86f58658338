"""`deepspeed.initialize` for N pipelines."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed

from avgpipe_ds import deepspeed_compat as compat
from avgpipe_ds.config import AvgPipeConfig
from avgpipe_ds.engine import AvgPipeEngine
from avgpipe_ds.errors import ConfigError
from avgpipe_ds.ownership import own_optimizer, parameter_list, with_placeholder
from avgpipe_ds.replicate import replicate
from avgpipe_ds.tracing.window import prepare_directory

__all__ = ["init_distributed", "initialize", "partition_of"]

_SAME_ON_ALL_RANKS = (
    "avgpipe",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "zero_optimization",
    "bf16",
    "fp16",
)


def init_distributed(*args: Any, **kwargs: Any) -> None:
    """`deepspeed.init_distributed` without DeepSpeed's silent, minutes-long compilation on CPU. Every rank calls it."""
    compat.skip_cpu_compilation()
    deepspeed.init_distributed(*args, **kwargs)


def partition_of(config: str | Mapping[str, Any]) -> list[int] | None:
    """The layers at which stages begin, as a configuration has them, for `PipelineModule(partition=...)`; None if it has none.

    Raises:
        ConfigError: the configuration can't be read, or its "avgpipe" block is wrong.

    """
    try:
        settings = compat.load_config(None, config, None)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{config} is no configuration: {error}") from error
    return AvgPipeConfig.from_deepspeed(settings).partition


def initialize(
    args: Any = None,
    model: compat.PipelineModule | None = None,
    optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: str | Mapping[str, Any] | None = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[AvgPipeEngine, Any, Any, Any]:
    """Build the engine; arguments and result are those of `deepspeed.initialize`, and every rank calls it.

    Args:
        args: may carry `deepspeed_config`.
        model: a `PipelineModule`; `avgpipe_ds.hf.to_pipeline` makes one of a Hugging Face model.
        optimizer: a torch optimizer or a callable that makes one from parameters; by default from the configuration.
        model_parameters: what to train, as parameters or groups; by default all of the model.
        training_data: a dataset, if `train_batch` is to be called without an iterator.
        lr_scheduler: a scheduler or a callable that makes one from an optimizer; by default from the configuration.
        distributed_port: as in DeepSpeed.
        mpu: must be None, as for any `PipelineModule`.
        dist_init_required: as in DeepSpeed.
        collate_fn: for `training_data`.
        config: path of a JSON file or a dictionary; DeepSpeed's, with the "avgpipe" block.
        mesh_param: must be None.
        config_params: another name of `config`.

    Returns:
        `engine, optimizer, training_dataloader, lr_scheduler`; the latter three are pipeline 0's. What is changed on the
        optimizer's parameter groups holds for all pipelines.

    Raises:
        ConfigError: a setting is wrong or does not go together with pipelines, the optimizer trains another model, another rank
            failed here, or the ranks' settings differ.
        TypeError: `model` is not a `PipelineModule`, or can't be copied.

    """
    init_distributed(dist_backend=None, distributed_port=distributed_port, dist_init_required=dist_init_required)
    plan: _Plan | None = None
    problem: Exception | None = None
    try:
        if mpu is not None or mesh_param is not None:
            raise ConfigError("mpu and mesh_param must be None: a PipelineModule brings its own topology")
        plan = _prepare(compat.load_config(args, config, config_params), model, optimizer, model_parameters, lr_scheduler)
    except Exception as error:  # noqa: BLE001 - told to all ranks, before any of them waits for the others inside DeepSpeed
        problem = error
    run = _agree({} if plan is None else {**plan.settings, "avgpipe": plan.block}, problem)
    assert plan is not None
    first, *copies = plan.belongings
    engine = compat.build_stage_engine(
        AvgPipeEngine,
        config=plan.settings,
        training_data=training_data,
        collate_fn=collate_fn,
        dist_init_required=dist_init_required,
        **first,
    )
    others = [_other_engine(plan.settings, own) for own in copies]
    assert isinstance(engine, AvgPipeEngine)
    engine.start(plan.block, others, run=run)
    if plan.spare is not None:
        engine.tune(_Further(plan.spare, plan.settings))
    elif plan.block.tuning.profile is not None:
        engine.tune(None)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is to be built.

    Attributes:
        settings: DeepSpeed's configuration.
        block: the "avgpipe" block that was in it.
        belongings: for each pipeline its model, optimizer, parameters and scheduler.
        spare: the same for one more, which further ones are copied from while N is being tuned; it trains nothing.

    """

    settings: dict[str, Any]
    block: AvgPipeConfig
    belongings: list[dict[str, Any]]
    spare: tuple[Any, ...] | None


def _prepare(settings: dict[str, Any], model: Any, optimizer: Any, model_parameters: Any, lr_scheduler: Any) -> _Plan:
    """Check everything that can be checked on this rank alone, and copy the model for all but the first pipeline.

    Raises:
        ConfigError, TypeError: as `initialize`.

    """
    block = AvgPipeConfig.from_deepspeed(settings)
    settings.pop("avgpipe", None)
    compat.refuse_unsupported(settings)
    prepare_directory(block.trace)
    _check_file("tuning.profile", block.tuning.profile)
    _check_file("preflight", block.preflight)
    if not isinstance(model, compat.PipelineModule):
        raise TypeError(
            f"model must be a deepspeed.pipe.PipelineModule, got {type(model).__name__}: see avgpipe_ds.hf.to_pipeline"
        )
    if block.partition is not None and list(model.parts) != block.partition:
        raise ConfigError(
            f'"avgpipe.partition" is {block.partition}, the model has the boundaries {list(model.parts)}: give it to the module,'
            " partition=avgpipe_ds.partition_of(config) of avgpipe_ds.PipelineModule and avgpipe_ds.hf.to_pipeline, or remove it"
        )
    placeholder = compat.ensure_trainable(model)
    if optimizer is None and "optimizer" not in settings and block.num_pipelines != 1:
        raise ConfigError('several pipelines need an optimizer: pass one, or put "optimizer" into the configuration')
    if optimizer is None:
        compat.warn_of_compilation(settings)
    parameters = None if model_parameters is None else parameter_list(model_parameters)
    if parameters is not None and placeholder is not None:  # those that train, a user may say, and here none does
        parameters = with_placeholder(parameters, placeholder)
    # Copied before DeepSpeed takes hold of the first: it moves the weights into flat buffers of its own.
    original = (model, optimizer, parameters, lr_scheduler)
    copies = [replicate(*original) for _ in range(block.first_num_pipelines - 1)]
    spare = replicate(*original) if block.num_pipelines == "auto" else None
    return _Plan(settings, block, [_belongings(*one) for one in (original, *copies)], spare)


def _check_file(key: str, file: str | bool | None) -> None:
    """Found before the training, not after it.

    Raises:
        ConfigError: its folder does not exist.

    """
    if isinstance(file, str) and not Path(file).parent.is_dir():
        raise ConfigError(f"avgpipe.{key}: there is no folder {Path(file).parent}")


def _belongings(model: compat.PipelineModule, optimizer: Any, parameters: Any, lr_scheduler: Any) -> dict[str, Any]:
    return {
        "model": model,
        "optimizer": own_optimizer(optimizer, model, parameters),
        "model_parameters": parameters,
        "lr_scheduler": lr_scheduler,
    }


@dataclass(frozen=True, slots=True)
class _Further:
    """Makes pipelines of a spare, which has the weights that training began with: `avgpipe_ds.engine.FurtherPipelines`."""

    spare: tuple[Any, ...]
    settings: dict[str, Any]

    def copies(self, number: int) -> list[dict[str, Any]]:
        """What `number` pipelines are built from; the last of them is the spare itself. No communication."""
        own = [replicate(*self.spare) for _ in range(number - 1)] + [self.spare] * (number > 0)
        return [_belongings(*one) for one in own]

    def build(self, copies: list[dict[str, Any]]) -> list[compat.StageEngine]:
        """Their engines. Every rank calls it."""
        return [_other_engine(self.settings, own) for own in copies]


def _other_engine(settings: dict[str, Any], belongings: dict[str, Any]) -> compat.StageEngine:
    """Of a pipeline that is not the first."""
    quiet = compat.config_for_other_pipelines(settings)
    return compat.build_stage_engine(compat.StageEngine, config=quiet, dist_init_required=False, **belongings)


def _agree(settings: Mapping[str, Any], problem: Exception | None) -> str:
    """An error on one rank is an error on all, and all have the same settings where that matters. Every rank calls it.

    Returns:
        A name for this run of the engine, the same on all ranks.

    Raises:
        Exception: `problem`, where there is one.
        ConfigError: another rank's error, or the ranks' configurations differ.

    """
    told = None if problem is None else f"{type(problem).__name__}: {problem}"
    mine = {key: repr(settings.get(key)) for key in _SAME_ON_ALL_RANKS}
    every: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, (told, mine, uuid.uuid4().hex))
    if problem is not None:
        raise problem
    for rank, (error, _, _) in enumerate(every):
        if error is not None:
            raise ConfigError(f"rank {rank} can't initialize: {error}")
    for rank, (_, theirs, _) in enumerate(every):
        different = [key for key in _SAME_ON_ALL_RANKS if theirs[key] != every[0][1][key]]
        if different:
            found = "; ".join(f'"{key}" is {every[0][1][key]} on rank 0, {theirs[key]} on rank {rank}' for key in different)
            raise ConfigError(f"the ranks' configurations differ, give all the same: {found}")
    run: str = every[0][2]
    return run
