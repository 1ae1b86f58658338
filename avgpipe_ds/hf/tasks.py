"""What a model is trained for: its head."""

from __future__ import annotations

from typing import Any, Literal

from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

__all__ = ["CLASSIFICATIONS", "Task", "auto_class"]

Task = Literal["sequence-classification", "token-classification", "masked-lm", "causal-lm"]

CLASSIFICATIONS: frozenset[str] = frozenset({"sequence-classification", "token-classification"})
"""Those whose labels are classes that have names."""

_AUTO_CLASSES: dict[str, Any] = {
    "sequence-classification": AutoModelForSequenceClassification,
    "token-classification": AutoModelForTokenClassification,
    "masked-lm": AutoModelForMaskedLM,
    "causal-lm": AutoModelForCausalLM,
}


def auto_class(task: Task) -> Any:
    """Transformers' factory of models with the task's head."""
    return _AUTO_CLASSES[task]
