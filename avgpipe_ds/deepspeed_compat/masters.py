"""The fp32 weights that optimizers step, under every wrapper that DeepSpeed puts around an optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor

from avgpipe_ds.deepspeed_compat.build import StageEngine

__all__ = [
    "MasterGroup",
    "load_scaler_state",
    "master_groups",
    "masters_of",
    "publish_masters",
    "scaler_state",
    "trained_weights",
]


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


def trained_weights(optimizer: torch.optim.Optimizer | None) -> list[list[Tensor]]:
    """By parameter group, the weights that an optimizer changes. Users often hand it frozen ones, too, which it leaves alone."""
    groups = [] if optimizer is None else optimizer.param_groups  # an engine that only evaluates has none
    return [[weight for weight in group["params"] if weight.requires_grad] for group in groups]


def masters_of(engine: StageEngine) -> list[Tensor]:
    """All masters of an engine, in the order of `master_groups`."""
    return [master for group in trained_weights(engine.basic_optimizer) for master in group]


def master_groups(engine: StageEngine) -> list[MasterGroup]:
    """The groups in the order of the base optimizer's `param_groups`, whose trained parameters are the masters."""
    optimizer = engine.optimizer
    steps = trained_weights(engine.basic_optimizer)
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
