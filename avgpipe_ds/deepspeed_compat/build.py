"""Build DeepSpeed engines that are told from outside what to do when."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.tensor_parallel.init_utils import load_ds_config

from avgpipe_ds.errors import ConfigError

logger = logging.getLogger(__name__)

__all__ = [
    "StageEngine",
    "build_stage_engine",
    "config_for_other_pipelines",
    "load_config",
    "refuse_unsupported",
    "skip_cpu_compilation",
    "warn_of_compilation",
]


class StageEngine(PipelineEngine):  # type: ignore[misc]
    """DeepSpeed's engine for one stage of one pipeline, told from outside what to do when.

    Attributes:
        gradient_norm: the norm over all stages, set before a step that clips.

    """

    gradient_norm: float | None = None

    def clip_fp32_gradients(self) -> None:
        """Clip by the norm over all stages. DeepSpeed's own counts the first stage only."""
        assert self.gradient_norm is not None
        scale = self.gradient_clipping() / (self.gradient_norm + 1e-6)
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        if scale < 1.0 and gradients:
            torch._foreach_mul_(gradients, scale)
        self._global_grad_norm = self.gradient_norm


def skip_cpu_compilation() -> None:
    """On CPU, keep DeepSpeed from compiling its shared-memory all-reduce: minutes of silence, for a gain that a pipeline does
    not see.
    """
    if get_accelerator().device_name() == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def load_config(args: Any, config: str | Mapping[str, Any] | None, config_params: Any) -> dict[str, Any]:
    """The configuration as a dictionary of its own, from where `deepspeed.initialize` would take it.

    Raises:
        ConfigError: there is none, or there are two.

    """
    from_args = getattr(args, "deepspeed_config", None)
    given = config if config is not None else config_params
    if (from_args is None) == (given is None):
        found = "neither" if given is None else "both"
        raise ConfigError(f"give the DeepSpeed configuration either as `config` or by --deepspeed_config; found {found}")
    source = given if given is not None else from_args
    if isinstance(source, Mapping):
        return dict(source)
    return dict(load_ds_config(source))


def config_for_other_pipelines(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of pipelines 1..N-1: as the first one's, but only the first reports to monitors and to the screen."""
    silent = {"tensorboard", "wandb", "csv_monitor", "comet", "flops_profiler", "dump_state"}
    return {key: value for key, value in config.items() if key not in silent} | {"steps_per_print": None}


def refuse_unsupported(config: Mapping[str, Any]) -> None:
    """Name what does not go together with pipelines before anything is built.

    Raises:
        ConfigError: ZeRO-2 or ZeRO-3, sparse gradients, or fp16 autocast with its own gradient scaler.

    """
    zero = config.get("zero_optimization") or {}
    if not isinstance(zero, Mapping):
        raise ConfigError(f'"zero_optimization" must be an object such as {{"stage": 1}}, got {zero!r}')
    stage = zero.get("stage", 0)
    if stage not in (0, 1):
        raise ConfigError(
            f'"zero_optimization.stage" is {stage!r}: pipelines work with ZeRO 0 and 1; ZeRO-2 and 3 partition gradients or '
            "weights that a pipeline needs whole until its batch is complete. Set it to 1 or 0"
        )
    clipping = config.get("gradient_clipping", 0)
    if not isinstance(clipping, int | float) or not clipping >= 0:
        raise ConfigError(f'"gradient_clipping" must be a number from 0 (0 for none), got {clipping!r}')
    if config.get("sparse_gradients"):
        raise ConfigError('"sparse_gradients" is not supported with pipelines: remove it')
    autocast = config.get("torch_autocast") or {}
    if autocast.get("enabled") and "16" in str(autocast.get("dtype", "")) and "b" not in str(autocast.get("dtype", "")):
        raise ConfigError(
            '"torch_autocast" with fp16 is not supported: use "bf16", or "fp16", whose loss scaling spans all stages'
        )


def warn_of_compilation(config: Mapping[str, Any]) -> None:
    """Say so when DeepSpeed is about to compile an Adam of its own on CPU, which takes minutes and prints nothing."""
    optimizer = config.get("optimizer") or {}
    if get_accelerator().device_name() != "cpu" or str(optimizer.get("type", "")).lower() not in ("adam", "adamw"):
        return
    if not (optimizer.get("params") or {}).get("torch_adam"):
        logger.warning(
            "DeepSpeed now compiles its own Adam, unless it has before: some minutes of silence on the first start. "
            'Put "torch_adam": true into the params of "optimizer" to use PyTorch\'s instead'
        )


def build_stage_engine(cls: type[StageEngine], *, model: PipelineModule, config: dict[str, Any], **arguments: Any) -> StageEngine:
    """What `deepspeed.initialize` does for a `PipelineModule`, with a class of ours. Every rank calls it."""
    config = dict(config)
    pipeline = dict(config.get("pipeline") or {})
    if pipeline.get("use_reentrant") is None:
        # Reentrant checkpointing dies on integer inputs, which every language model's first stage has.
        pipeline["use_reentrant"] = False
    config["pipeline"] = pipeline
    deepspeed.zero.partition_parameters.shutdown_init_context()
    mpu = model.mpu()
    parsed = DeepSpeedConfig(config, mpu)
    deepspeed.set_optimizer_flags(parsed, model)
    engine = cls(args=None, model=model, mpu=mpu, config=config, config_class=parsed, **arguments)
    deepspeed.zero.partition_parameters.restore_init_context()
    engine._configure_python_gc()
    return engine
