"""What one pipeline keeps on one stage between iterations, and N of them. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from avgpipe_ds.memory.breakdown import Breakdown

__all__ = ["ModelState"]


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

    trained: int = 0
    frozen: int = 0
    gradients: int = 0
    optimizer: int = 0
    reference: int = 0

    def of_pipelines(self, num_pipelines: int, *, activations: int = 0) -> Breakdown:
        """Of N pipelines together (paper, section 5.2.2), with what they store of activations."""
        return Breakdown(
            weights=num_pipelines * self.trained + self.frozen,
            gradients=num_pipelines * self.gradients,
            optimizer=num_pipelines * self.optimizer,
            reference=self.reference if num_pipelines > 1 else 0,
            activations=activations,
        )
