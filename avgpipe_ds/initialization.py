"""`deepspeed.initialize` for N pipelines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import deepspeed
import torch

from avgpipe_ds import deepspeed_compat as compat
from avgpipe_ds.config import AvgPipeConfig
from avgpipe_ds.engine import AvgPipeEngine
from avgpipe_ds.errors import ConfigError
from avgpipe_ds.replicate import replicate

__all__ = ["init_distributed", "initialize"]


def init_distributed(*args: Any, **kwargs: Any) -> None:
    """`deepspeed.init_distributed` without DeepSpeed's silent, minutes-long compilation on CPU. Every rank calls it."""
    compat.skip_cpu_compilation()
    deepspeed.init_distributed(*args, **kwargs)


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
        ConfigError: a setting is wrong or does not go together with pipelines, or the optimizer trains another model.
        TypeError: `model` is not a `PipelineModule`, or can't be copied.

    """
    init_distributed(dist_backend=None, distributed_port=distributed_port, dist_init_required=dist_init_required)
    settings = compat.load_config(args, config, config_params)
    block = AvgPipeConfig.from_deepspeed(settings)
    settings.pop("avgpipe", None)
    compat.refuse_unsupported(settings)
    if mpu is not None or mesh_param is not None:
        raise ConfigError("mpu and mesh_param must be None: a PipelineModule brings its own topology")
    if not isinstance(model, compat.PipelineModule):
        raise TypeError(
            f"model must be a deepspeed.pipe.PipelineModule, got {type(model).__name__}: see avgpipe_ds.hf.to_pipeline"
        )
    compat.ensure_trainable(model)
    if optimizer is None and "optimizer" not in settings and block.num_pipelines > 1:
        raise ConfigError('several pipelines need an optimizer: pass one, or put "optimizer" into the configuration')
    if optimizer is None:
        compat.warn_of_compilation(settings)
    parameters = None if model_parameters is None else list(model_parameters)
    _check_ownership(model, "model_parameters", parameters or ())
    if isinstance(optimizer, torch.optim.Optimizer):
        _check_ownership(model, "the optimizer", optimizer.param_groups)
    # Copied before DeepSpeed takes hold of the first: it moves the weights into flat buffers of its own.
    copies = [replicate(model, optimizer, parameters, lr_scheduler) for _ in range(block.num_pipelines - 1)]
    engine = compat.build_stage_engine(
        AvgPipeEngine,
        model=model,
        config=settings,
        optimizer=optimizer,
        model_parameters=parameters,
        lr_scheduler=lr_scheduler,
        training_data=training_data,
        collate_fn=collate_fn,
        dist_init_required=dist_init_required,
    )
    quiet = compat.config_for_other_pipelines(settings)
    others = [
        compat.build_stage_engine(
            compat.StageEngine,
            model=module,
            config=quiet,
            optimizer=its_optimizer,
            model_parameters=its_parameters,
            lr_scheduler=its_scheduler,
            dist_init_required=False,
        )
        for module, its_optimizer, its_parameters, its_scheduler in copies
    ]
    assert isinstance(engine, AvgPipeEngine)
    engine.start(block, others)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _check_ownership(model: compat.PipelineModule, holder: str, parameters: Iterable[Any]) -> None:
    """Parameters, or groups of them, must be this stage's: others would be trained by nobody, and silently.

    Raises:
        ConfigError: some are not.

    """
    own = {id(p) for p in model.parameters()}
    flat = [p for group in parameters for p in (group["params"] if isinstance(group, Mapping) else [group])]
    foreign = [p for p in flat if isinstance(p, torch.Tensor) and id(p) not in own]
    if foreign:
        raise ConfigError(
            f"{len(foreign)} of the {len(flat)} parameters of {holder} do not belong to this stage of the model: "
            "make it from the parameters() of the PipelineModule that you pass"
        )
