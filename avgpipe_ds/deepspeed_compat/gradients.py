"""Where gradients are, and which of their reductions DeepSpeed does itself."""

from __future__ import annotations

import torch
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor

from avgpipe_ds.deepspeed_compat.build import StageEngine

__all__ = [
    "gradient_bytes",
    "gradients_to_reduce",
    "has_own_collectives",
    "local_squared_norm",
    "reduces_gradients_itself",
    "scale_for_reduction",
    "tied_gradients",
]


def has_own_collectives(engine: StageEngine) -> bool:
    """Whether DeepSpeed's optimizer itself blocks in collectives when it steps (bf16, fp16, ZeRO-1)."""
    return engine.optimizer is not engine.basic_optimizer


def reduces_gradients_itself(engine: StageEngine) -> bool:
    """Whether DeepSpeed's optimizer also reduces the gradients over the replicas (ZeRO-1 without fp32 accumulation)."""
    return isinstance(engine.optimizer, DeepSpeedZeroOptimizer)


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
        for has_gradient in engine.optimizer.fp32_groups_has_gradients:  # a stage without any would make its step fail
            has_gradient[:] = [True] * len(has_gradient)
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


def gradient_bytes(engine: StageEngine) -> int:
    """Bytes of the gradients as they are at an optimizer step, with the fp32 sums that bf16 training keeps beside them."""
    own: int = sum(p.numel() * p.element_size() for p in engine.module.parameters() if p.requires_grad)
    if not engine.using_bf16_optimizer:
        return own
    return own + sum(int(flat.numel()) * int(flat.element_size()) for flat in engine.optimizer.fp32_groups_gradients_flat)


def local_squared_norm(engine: StageEngine) -> float:
    """Squared gradient norm of this stage, a tied weight counted on the first of its stages only. Waits for the device."""
    gradients = [p.grad for p in engine.module.parameters() if p.grad is not None and not getattr(p, "ds_pipe_replicated", False)]
    if not gradients:
        return 0.0
    norms = torch.stack(torch._foreach_norm([g.float() for g in gradients]))
    return float(norms.double().square().sum())


def _gradient_or_zeros(param: Tensor) -> Tensor:
    if param.grad is None:
        param.grad = torch.zeros_like(param)
    return param.grad
