"""What `Trainer` logs: means since the last line, and where the training stands."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["TrainingLog"]


@dataclass(slots=True)
class TrainingLog:
    """Losses and times, of the whole training and since the last line.

    Attributes:
        total_loss: sum over all steps, those before a resumption included.
        loss, steps: the sum over the steps since the last line, and their number.
        seconds: in which those were trained; not of evaluations and checkpoints.
        epoch: at the last line.

    """

    total_loss: float = 0.0
    loss: float = 0.0
    steps: int = 0
    seconds: float = field(default=0.0, compare=False)
    epoch: float = 0.0

    @contextmanager
    def training(self) -> Iterator[None]:
        """The time in the block is that of training."""
        start = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - start

    def add(self, loss: float) -> None:
        """One more step."""
        self.total_loss += loss
        self.loss += loss
        self.steps += 1

    def line(self, *, learning_rate: float, grad_norm: float | None, epoch: float, num_samples: int) -> dict[str, float]:
        """What is logged; counting begins anew.

        Args:
            learning_rate: of the last step.
            grad_norm: of the first pipeline in the last step, before clipping; None if it is not known.
            epoch: where the training stands.
            num_samples: of an epoch.

        """
        line = {"loss": self.loss / self.steps, "learning_rate": learning_rate}
        if grad_norm is not None:
            line["grad_norm"] = float(grad_norm)
        if self.seconds > 0:
            line["samples_per_second"] = (epoch - self.epoch) * num_samples / self.seconds
        self.loss, self.steps, self.seconds, self.epoch = 0.0, 0, 0.0, epoch
        return line

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        for name, value in state.items():
            setattr(self, name, value)
