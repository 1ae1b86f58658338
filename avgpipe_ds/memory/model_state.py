"""Weights, gradients, optimizer states and reference of one stage, as they lie in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from avgpipe_ds import deepspeed_compat as compat
from avgpipe_ds.averaging.reference import Reference
from avgpipe_ds.memory.breakdown import Breakdown
from avgpipe_ds.memory.tensors import bytes_of, optimizer_tensors

__all__ = ["ModelState", "measured_state"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelState:
    """Bytes of one pipeline on one stage.

    Attributes:
        trained: weights that train, and fp32 masters if there are any.
        frozen: weights that do not, stored once for all pipelines.
        gradients: as they are at an optimizer step.
        optimizer: states; 0 before the first step.
        reference: the reference model and the sum of the updates, as two pipelines or more would have them.

    """

    trained: int
    frozen: int
    gradients: int
    optimizer: int
    reference: int

    @classmethod
    def of(cls, engine: compat.StageEngine, *, has_momentum: bool = False) -> ModelState:
        """Of a pipeline's engine; `has_momentum` says whether the reference has one."""
        masters = compat.masters_of(engine)
        parameters = list(engine.module.parameters())
        return cls(
            trained=bytes_of([p for p in parameters if p.requires_grad] + masters),
            frozen=bytes_of(p for p in parameters if not p.requires_grad),
            gradients=compat.gradient_bytes(engine),
            optimizer=0 if engine.basic_optimizer is None else bytes_of(optimizer_tensors(engine.basic_optimizer)),
            reference=(3 if has_momentum else 2) * sum(4 * master.numel() for master in masters),
        )

    def of_pipelines(self, num_pipelines: int) -> Breakdown:
        """Of N pipelines together, activations apart."""
        return Breakdown(
            weights=num_pipelines * self.trained + self.frozen,
            gradients=num_pipelines * self.gradients,
            optimizer=num_pipelines * self.optimizer,
            reference=self.reference if num_pipelines > 1 else 0,
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
