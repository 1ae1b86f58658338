"""The only module that touches DeepSpeed's private parts.

Everything here was read off DeepSpeed 0.19.8. A newer version gets one warning; an older one is refused, because it lacks what
is needed here.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor

from avgpipe_ds.errors import ConfigError

logger = logging.getLogger(__name__)

MINIMUM_DEEPSPEED = "0.19.8"
NEWEST_TESTED_DEEPSPEED = "0.19.8"


def check_deepspeed_version(found: str) -> None:
    """Refuse a DeepSpeed that is too old, warn once about one that was not tested.

    Raises:
        ImportError: older than `MINIMUM_DEEPSPEED`.

    """
    if Version(found) < Version(MINIMUM_DEEPSPEED):
        raise ImportError(
            f"avgpipe_ds needs deepspeed >= {MINIMUM_DEEPSPEED}, found {found}: "
            f"pip install --upgrade 'deepspeed>={MINIMUM_DEEPSPEED}'"
        )
    if Version(Version(found).base_version) > Version(NEWEST_TESTED_DEEPSPEED):
        logger.warning(
            "deepspeed %s is newer than %s, the newest that avgpipe_ds was tested with", found, NEWEST_TESTED_DEEPSPEED
        )


check_deepspeed_version(version("deepspeed"))

import deepspeed  # noqa: E402 - an old version must be refused before its missing parts are imported
from deepspeed.accelerator import get_accelerator  # noqa: E402
from deepspeed.pipe import PipelineModule, TiedLayerSpec  # noqa: E402
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer  # noqa: E402
from deepspeed.runtime.config import DeepSpeedConfig  # noqa: E402
from deepspeed.runtime.engine import DeepSpeedEngine  # noqa: E402
from deepspeed.runtime.pipe.engine import PipelineEngine  # noqa: E402
from deepspeed.runtime.tensor_parallel.init_utils import load_ds_config  # noqa: E402
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer  # noqa: E402

__all__ = [
    "MasterGroup",
    "PipelineModule",
    "StageEngine",
    "backward_from_gradients",
    "backward_from_loss",
    "build_stage_engine",
    "communicators_of",
    "config_for_other_pipelines",
    "discard_gradients",
    "ensure_trainable",
    "forward",
    "gradients_to_reduce",
    "has_own_collectives",
    "load_config",
    "local_squared_norm",
    "master_groups",
    "needs_inputs_with_gradient",
    "optimizer_step",
    "place_of",
    "publish_masters",
    "reduces_gradients_itself",
    "refuse_unsupported",
    "load_scaler_state",
    "scale_for_reduction",
    "scaler_state",
    "skip_cpu_compilation",
    "tied_gradients",
    "tied_stages",
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
    stage = (config.get("zero_optimization") or {}).get("stage", 0)
    if stage not in (0, 1):
        raise ConfigError(
            f'"zero_optimization.stage" is {stage!r}: pipelines work with ZeRO 0 and 1; ZeRO-2 and 3 partition gradients or '
            "weights that a pipeline needs whole until its batch is complete. Set it to 1 or 0"
        )
    if config.get("sparse_gradients"):
        raise ConfigError('"sparse_gradients" is not supported with pipelines: remove it')
    autocast = config.get("torch_autocast") or {}
    if autocast.get("enabled") and "16" in str(autocast.get("dtype", "")) and "b" not in str(autocast.get("dtype", "")):
        raise ConfigError(
            '"torch_autocast" with fp16 is not supported: use "bf16", or "fp16", whose loss scaling spans all stages'
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
    engine = cls(model=model, mpu=mpu, config=config, config_class=parsed, **arguments)
    deepspeed.zero.partition_parameters.restore_init_context()
    engine._configure_python_gc()
    return engine


def ensure_trainable(module: PipelineModule) -> None:
    """Give a stage with nothing to train one unused parameter, for DeepSpeed needs an optimizer on every stage.

    It belongs to no layer, so it is neither computed with nor saved.
    """
    if not any(p.requires_grad for p in module.parameters()):
        logger.warning("stage %d has nothing to train; it only passes gradients on", module.stage_id)
        device = get_accelerator().device_name(module.local_rank)
        module.register_parameter("nothing_to_train", torch.nn.Parameter(torch.zeros(1, device=device)))


def place_of(module: PipelineModule) -> tuple[int, int, list[list[int]]]:
    """This rank's stage and replica, and the global ranks by [replica][stage].

    Raises:
        ConfigError: the topology has more axes than pipe and data.

    """
    topology = module._topo
    others = [axis for axis in topology.get_axis_names() if axis not in ("pipe", "data") and topology.get_dim(axis) > 1]
    if others:
        raise ConfigError(f"the topology has the axes {others}: only pipe and data are supported")
    num_stages, num_replicas = topology.get_dim("pipe"), max(1, topology.get_dim("data"))
    mine = topology.get_coord(module.global_rank)
    ranks: list[list[int]] = [[0] * num_stages for _ in range(num_replicas)]
    for rank in range(topology.world_size()):
        where = topology.get_coord(rank)
        ranks[getattr(where, "data", 0)][where.pipe] = rank
    return mine.pipe, getattr(mine, "data", 0), ranks


def tied_stages(module: PipelineModule) -> list[tuple[int, ...]]:
    """For each tied layer, the stages that hold a copy; the same list on every rank."""
    keys = sorted({spec.key for spec in module._layer_specs if isinstance(spec, TiedLayerSpec)})
    return [
        tuple(sorted({module.stage_owner(i) for i, spec in enumerate(module._layer_specs) if getattr(spec, "key", None) == key}))
        for key in keys
    ]


def communicators_of(module: PipelineModule) -> list[Any]:
    """The parts of a module that stand for the cluster, not for the model: replicas share them."""
    shared: list[Any] = [module._grid, module._topo, module.world_group, module._layer_specs]
    shared.extend(tied["group"] for tied in module.tied_comms.values())
    return shared


def forward(engine: StageEngine, inputs: Any) -> Any:
    """Forward of this stage's layers under DeepSpeed's hooks and autocast."""
    return DeepSpeedEngine.forward(engine, inputs)


def backward_from_loss(engine: StageEngine, loss: Tensor) -> None:
    """Backward of the last stage; DeepSpeed scales the loss by the number of micro-batches and for fp16."""
    DeepSpeedEngine.backward(engine, loss)


def backward_from_gradients(engine: StageEngine, outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Backward of a stage that is not the last, in one pass over the graph (DeepSpeed's own walks it once per tensor)."""
    accumulate = engine.using_bf16_optimizer
    if accumulate:
        engine.optimizer.clear_lp_grads()
    engine._running_engine_backward = True
    try:
        torch.autograd.backward(list(outputs), list(gradients))
    finally:
        engine._running_engine_backward = False
    if accumulate and not engine._config.bfloat16_config.immediate_grad_update:
        engine.optimizer.update_hp_grads(clear_lp_grads=False)


def needs_inputs_with_gradient(engine: StageEngine) -> bool:
    """Whether the inputs of the first stage must ask for a gradient: reentrant checkpointing cuts its layers off otherwise."""
    return bool(engine._reentrant_activation_checkpointing())


def discard_gradients(engine: StageEngine) -> None:
    """Forget the gradients of a batch that is given up."""
    engine.zero_grad()
    if isinstance(engine.optimizer, BF16_Optimizer):
        engine.optimizer.clear_hp_grads()
        engine.optimizer.clear_lp_grads()
    elif has_own_collectives(engine):
        engine.optimizer.zero_grad()


def has_own_collectives(engine: StageEngine) -> bool:
    """Whether DeepSpeed's optimizer itself blocks in collectives when it steps (bf16, fp16, ZeRO-1)."""
    return engine.optimizer is not engine.basic_optimizer


def reduces_gradients_itself(engine: StageEngine) -> bool:
    """Whether DeepSpeed's optimizer also reduces the gradients over the replicas (ZeRO-1 without fp32 accumulation)."""
    return isinstance(engine.optimizer, DeepSpeedZeroOptimizer)


def optimizer_step(engine: StageEngine) -> None:
    """Step optimizer and learning-rate scheduler and clear the gradients, as after a whole batch."""
    if reduces_gradients_itself(engine):
        engine._exec_reduce_grads()
    engine._exec_optimizer_step()


def scaler_state(engine: StageEngine) -> dict[str, Any]:
    """State of the fp16 loss scaling, empty without fp16."""
    holder = getattr(engine.optimizer, "loss_scaler", None) or getattr(engine.optimizer, "loss_scale_config", None)
    if not engine.fp16_enabled() or holder is None:
        return {}
    return {name: value for name, value in vars(holder).items() if isinstance(value, int | float | bool)}


def load_scaler_state(engine: StageEngine, state: Mapping[str, Any]) -> None:
    """Inverse of `scaler_state`."""
    holder = getattr(engine.optimizer, "loss_scaler", None) or getattr(engine.optimizer, "loss_scale_config", None)
    if holder is not None:
        vars(holder).update(state)


def tied_gradients(engine: StageEngine) -> list[tuple[Tensor, tuple[int, ...]]]:
    """Gradients of tied weights with the ranks that hold a copy, in the same order on all of them; missing ones become zeros."""
    pairs = []
    for tied in engine.module.tied_comms.values():
        for name in tied["weight_attr"]:
            weight = engine.module._recursive_getattr(tied["module"], name)
            if not weight.requires_grad or len(tied["ranks"]) < 2:
                continue
            if engine.using_bf16_optimizer:
                gradient = getattr(weight, "_hp_grad", None)
                assert gradient is not None, f"the tied weight {name} got no gradient"
            else:
                gradient = _gradient_or_zeros(weight)
            pairs.append((gradient, tuple(tied["ranks"])))
    return pairs


def gradients_to_reduce(engine: StageEngine) -> list[Tensor]:
    """The gradients that the data-parallel group averages; missing ones become zeros, as in DeepSpeed (weight decay then still
    acts).
    """
    if engine.using_bf16_optimizer:
        return [g for g in engine.optimizer.get_grads_for_reduction()[0] if g.numel()]
    return [_gradient_or_zeros(p) for p in engine.module.parameters() if p.requires_grad and p.numel()]


def scale_for_reduction(engine: StageEngine, num_replicas: int) -> tuple[float, float, torch.dtype]:
    """Factors before and after the sum over replicas, and the dtype to sum in, from DeepSpeed's configuration."""
    predivide = engine.gradient_predivide_factor()
    if not engine.gradient_average:
        before, after = 1.0, 1.0
    elif engine.postscale_gradients():
        before, after = 1.0 / predivide, predivide / num_replicas
    else:
        before, after = 1.0 / num_replicas, 1.0
    return before, after, engine.communication_data_type


def local_squared_norm(engine: StageEngine) -> float:
    """Squared gradient norm of this stage, a tied weight counted on the first of its stages only. Waits for the device."""
    gradients = [p.grad for p in engine.module.parameters() if p.grad is not None and not getattr(p, "ds_pipe_replicated", False)]
    if not gradients:
        return 0.0
    norms = torch.stack(torch._foreach_norm([g.float() for g in gradients]))
    return float(norms.double().square().sum())


@dataclass(frozen=True, slots=True)
class MasterGroup:
    """How the fp32 weights that the optimizer steps lie beside the weights that the model computes with.

    Attributes:
        params: the model's parameters.
        masters: what the optimizer steps: the parameters themselves, one fp32 tensor for each, or one flat tensor for all.
        flat: whether `masters` is one flat tensor that holds all parameters one after the other, or this rank's part of them.
        partitioned_over: the data-parallel process group over which the flat tensor is partitioned, if it is.

    """

    params: list[Tensor]
    masters: list[Tensor]
    flat: bool = False
    partitioned_over: Any = None

    def whole(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Tensors laid out as the masters, as one tensor per parameter. Collective over `partitioned_over`."""
        if not self.flat:
            return list(values)
        (full,) = values
        size = 1 if self.partitioned_over is None else torch.distributed.get_world_size(self.partitioned_over)
        if size > 1:
            partition, full = full.detach().contiguous(), full.new_empty(size * full.numel())
            torch.distributed.all_gather_into_tensor(full, partition, group=self.partitioned_over)
        lengths = [p.numel() for p in self.params]
        pieces = torch.split(full[: sum(lengths)], lengths)
        return [piece.view(p.shape) for piece, p in zip(pieces, self.params, strict=True)]


def master_groups(engine: StageEngine) -> list[MasterGroup]:
    """The groups in the order of the base optimizer's `param_groups`, whose parameters are the masters."""
    optimizer = engine.optimizer
    steps = [list(group["params"]) for group in engine.basic_optimizer.param_groups]
    if isinstance(optimizer, BF16_Optimizer):
        return [
            MasterGroup(list(params), masters, True, group)
            for params, masters, group in zip(optimizer.bf16_groups, steps, optimizer.real_dp_process_group, strict=True)
        ]
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        return [
            MasterGroup(list(params), masters, True, group)
            for params, masters, group in zip(
                optimizer.round_robin_bit16_groups, steps, optimizer.real_dp_process_group, strict=True
            )
        ]
    if optimizer is engine.basic_optimizer:
        return [MasterGroup(masters, masters) for masters in steps]
    # fp16: one fp32 tensor per parameter, or (fused) one flat tensor that is not partitioned
    return [
        MasterGroup(list(params), masters, len(masters) == 1 and masters[0].shape != params[0].shape)
        for params, masters in zip(optimizer.fp16_groups, steps, strict=True)
    ]


def publish_masters(engine: StageEngine) -> None:
    """Make the model compute with the present masters. Collective over the data-parallel group when they are partitioned."""
    optimizer = engine.optimizer
    if isinstance(optimizer, BF16_Optimizer | DeepSpeedZeroOptimizer):
        optimizer.update_lp_params()
        return
    for group in master_groups(engine):
        for param, value in zip(group.params, group.whole(group.masters), strict=True):
            if param is not value:
                param.data.copy_(value)


def _gradient_or_zeros(param: Tensor) -> Tensor:
    if param.grad is None:
        param.grad = torch.zeros_like(param)
    return param.grad
