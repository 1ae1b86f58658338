"""What a simulated stage needs for a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass, fields

__all__ = ["StageCosts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """Seconds on one stage.

    Attributes:
        forward_s: one forward; above 0.
        backward_s: one backward; above 0.
        activation_s: from the end of a forward until its result is at the next stage.
        gradient_s: from the end of a backward until its result is at the previous stage.
        step_s: one optimizer step of one pipeline, with its part of the averaging.

    Raises:
        ValueError: a number is out of range.

    """

    forward_s: float = 1.0
    backward_s: float = 2.0
    activation_s: float = 0.2
    gradient_s: float = 0.2
    step_s: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value, computation = getattr(self, field.name), field.name in ("forward_s", "backward_s")
            if not 0 <= value < float("inf") or (computation and value == 0):
                raise ValueError(f"{field.name} must be {'above' if computation else 'at least'} 0 s, got {value}")

    @classmethod
    def uniform(cls, forward_s: float = 1.0, backward_s: float = 2.0, message_s: float = 0.2) -> StageCosts:
        """Costs with messages that take as long in both directions."""
        return cls(forward_s=forward_s, backward_s=backward_s, activation_s=message_s, gradient_s=message_s)
