"""What an evaluation is asked for; the same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from avgpipe_ds.evaluating.metrics import Metrics, load_metrics

__all__ = ["EvaluatedWeights", "Request"]

EvaluatedWeights = Literal["reference", "pipelines"]
"""Whose weights: the reference model's, or those of each pipeline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """See `AvgPipeEngine.evaluate`."""

    metrics: Metrics | str | Sequence[str] | None
    weights: EvaluatedWeights
    reduce_outputs: Callable[[Any, Any], Any] | None

    def check(self) -> None:
        """Look for what can't be.

        Raises:
            ValueError: with what was expected.

        """
        if self.weights not in get_args(EvaluatedWeights):
            raise ValueError(f'evaluate() wants weights="reference" or "pipelines", got {self.weights!r}')
        if self.metrics is not None and not callable(self.metrics):
            names = self.names
            if not names or not all(isinstance(name, str) for name in names):
                raise ValueError(
                    "evaluate() wants metrics as a function of predictions and labels, or as names of the evaluate library, got "
                    f"{self.metrics!r}"
                )
        if self.reduce_outputs is not None and self.metrics is None:
            raise ValueError("reduce_outputs is for what metrics look at: pass metrics, too, or leave it out")

    @property
    def names(self) -> list[str]:
        """Of the metrics, where they are named."""
        if isinstance(self.metrics, str):
            return [self.metrics]
        return list(self.metrics) if isinstance(self.metrics, Sequence) else []

    def load_metrics(self) -> Metrics | None:
        """What computes the metrics.

        Raises:
            ImportError, ValueError: as `load_metrics`.

        """
        return self.metrics if self.metrics is None or callable(self.metrics) else load_metrics(self.names)

    def __str__(self) -> str:
        metrics = self.names if self.names else None if self.metrics is None else "a function"
        return f"weights={self.weights!r}, metrics={metrics}, reduce_outputs={'a function' if self.reduce_outputs else None}"
