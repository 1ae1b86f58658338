"""Bytes on one stage, by kind. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

__all__ = ["Breakdown", "largest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """Bytes on one stage, all pipelines together.

    Attributes:
        weights: of the models, and fp32 master copies if there are any.
        gradients: as they are at an optimizer step.
        optimizer: its states.
        reference: of elastic averaging: the reference model and the sum of the updates.
        activations: the most that autograd keeps for backwards at a time.

    """

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    reference: int = 0
    activations: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return sum(getattr(self, field.name) for field in fields(self))


def largest(stages: Iterable[Breakdown]) -> int:
    """Bytes on the stage that needs most."""
    return max(stage.total for stage in stages)
