"""Forward, backward and step of one stage, under DeepSpeed's hooks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.torch_autocast import autocast_if_enabled
from torch import Tensor

from avgpipe_ds.deepspeed_compat.build import StageEngine
from avgpipe_ds.deepspeed_compat.gradients import has_own_collectives, reduces_gradients_itself

__all__ = [
    "autocast",
    "backward_from_gradients",
    "backward_from_loss",
    "discard_gradients",
    "forward",
    "forward_alone",
    "needs_inputs_with_gradient",
    "optimizer_step",
]


def forward(engine: StageEngine, inputs: Any) -> Any:
    """Forward of this stage's layers under DeepSpeed's hooks and autocast."""
    return DeepSpeedEngine.forward(engine, inputs)


def forward_alone(engine: StageEngine, inputs: Any) -> Any:
    """The same forward outside of training, without what DeepSpeed does around it; `torch.autograd.grad` may follow."""
    if engine.fp16_auto_cast():
        inputs = engine._cast_inputs_half(inputs)
    with autocast(engine):
        return engine.module(inputs)


def autocast(engine: StageEngine) -> AbstractContextManager[Any]:
    """The precision that the configuration asks for."""
    context: AbstractContextManager[Any] = autocast_if_enabled(engine)
    return context


def needs_inputs_with_gradient(engine: StageEngine) -> bool:
    """Whether the inputs of the first stage must ask for a gradient: reentrant checkpointing cuts its layers off otherwise."""
    return bool(engine._reentrant_activation_checkpointing())


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


def optimizer_step(engine: StageEngine) -> None:
    """Step optimizer and learning-rate scheduler and clear the gradients, as after a whole batch."""
    if reduces_gradients_itself(engine):
        engine._exec_reduce_grads()
    engine._exec_optimizer_step()


def discard_gradients(engine: StageEngine) -> None:
    """Forget the gradients of a batch that is given up."""
    engine.zero_grad()
    if isinstance(engine.optimizer, BF16_Optimizer):
        engine.optimizer.clear_hp_grads()
        engine.optimizer.clear_lp_grads()
    elif has_own_collectives(engine):
        engine.optimizer.zero_grad()
