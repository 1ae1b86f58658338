"""Tensors and tuples of tensors: what DeepSpeed's layers pass on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

__all__ = ["as_tuple", "check_stage_output", "map_tensors"]


def as_tuple(value: Any) -> tuple[Tensor, ...]:
    """A tensor or a tuple of tensors as a tuple."""
    return value if isinstance(value, tuple) else (value,)


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """A function of a tensor, or of each one in a tuple; None stays None."""
    if value is None or isinstance(value, Tensor):
        return None if value is None else function(value)
    return tuple(function(tensor) for tensor in value)


def check_stage_output(value: Any, stage_id: int) -> None:
    """Refuse what can't be sent to the next stage.

    Raises:
        TypeError: not a tensor or a tuple of tensors.

    """
    if isinstance(value, Tensor) or (isinstance(value, tuple) and all(isinstance(t, Tensor) for t in value)):
        return
    found = type(value).__name__
    if isinstance(value, tuple):
        found = f"tuple of ({', '.join(type(t).__name__ for t in value)})"
    raise TypeError(
        f"the last layer of stage {stage_id} must return a tensor or a tuple of tensors for the next stage, got a {found}"
    )
