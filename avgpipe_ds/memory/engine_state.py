"""The bytes of weights, gradients, optimizer states and reference, as they lie in memory."""

from __future__ import annotations

from collections.abc import Sequence

from avgpipe_ds import deepspeed_compat as compat
from avgpipe_ds.averaging.reference import Reference
from avgpipe_ds.memory.breakdown import Breakdown
from avgpipe_ds.memory.model_state import ModelState
from avgpipe_ds.memory.tensors import bytes_of, optimizer_tensors

__all__ = ["measured_state", "state_of_one"]


def state_of_one(engine: compat.StageEngine, *, has_momentum: bool = False) -> ModelState:
    """Of one pipeline's engine; `has_momentum` says whether its reference has, or would have, one."""
    masters = compat.masters_of(engine)
    parameters = list(engine.module.parameters())
    return ModelState(
        trained=bytes_of([p for p in parameters if p.requires_grad] + masters),
        frozen=bytes_of(p for p in parameters if not p.requires_grad),
        gradients=compat.gradient_bytes(engine),
        optimizer=0 if engine.basic_optimizer is None else bytes_of(optimizer_tensors(engine.basic_optimizer)),
        reference=(3 if has_momentum else 2) * sum(4 * master.numel() for master in masters),
    )


def measured_state(engines: Sequence[compat.StageEngine], reference: Reference | None) -> Breakdown:
    """Of all pipelines of a stage as they are, activations apart."""
    weights = [weight for engine in engines for weight in (*engine.module.parameters(), *compat.masters_of(engine))]
    optimizers = [engine.basic_optimizer for engine in engines if engine.basic_optimizer is not None]
    return Breakdown(
        weights=bytes_of(weights),
        gradients=sum(compat.gradient_bytes(engine) for engine in engines),
        optimizer=bytes_of(tensor for optimizer in optimizers for tensor in optimizer_tensors(optimizer)),
        reference=0 if reference is None else bytes_of(reference.rule.tensors()),
    )
