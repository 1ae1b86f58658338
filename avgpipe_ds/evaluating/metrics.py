"""Metrics: functions of the predictions and labels of a whole data set, or names of the `evaluate` library."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

from avgpipe_ds.execution.loss_record import LOSS

__all__ = ["Metrics", "Scores", "checked_scores", "load_metrics"]

Metrics = Callable[[Any, Any], Mapping[str, Any]]
"""`metrics(predictions, labels)`: numbers by name."""

Scores = dict[str, float]
"""Numbers by name."""


def load_metrics(names: Sequence[str]) -> Metrics:
    """The metrics of these names, or in these folders, together.

    Raises:
        ImportError: `evaluate` is not installed.
        ValueError: it does not know a name, or can't reach the hub, where their scripts are.

    """
    try:
        import evaluate
    except ImportError as error:
        raise ImportError(
            f"metrics={list(names)!r} are names of the evaluate library, which is not installed: pip install "
            "'avgpipe-ds[evaluate]', or pass a function of predictions and labels"
        ) from error
    loaded = []
    for name in names:
        try:
            loaded.append(evaluate.load(name, keep_in_memory=True))
        except Exception as error:  # noqa: BLE001 - of whatever kind: the hub, the script, or what the script imports
            raise ValueError(
                f"the evaluate library can't load the metric {name!r}: {type(error).__name__}: {error}. A folder with its script "
                "needs no hub"
            ) from error

    def compute(predictions: Any, labels: Any) -> dict[str, Any]:
        results = [metric.compute(predictions=predictions, references=labels) for metric in loaded]
        return {name: value for result in results for name, value in result.items()}

    return compute


def checked_scores(scores: Any) -> Scores:
    """What metrics returned, as floats.

    Raises:
        ValueError: it is no dictionary of numbers.

    """
    if not isinstance(scores, Mapping):
        raise ValueError(f"metrics must return a dictionary of numbers, got a {type(scores).__name__}")
    numbers: Scores = {}
    for name, value in scores.items():
        if not isinstance(name, str) or name == LOSS:
            raise ValueError(f"metrics must return names other than {LOSS!r}, as strings, got {name!r}")
        try:
            numbers[name] = float(value if isinstance(value, Real) else value.item())
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"metrics must return numbers, but {name!r} is a {type(value).__name__}: {value!r}") from error
    return numbers
