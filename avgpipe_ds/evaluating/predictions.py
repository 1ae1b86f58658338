"""What a model says of the samples of a data set, put back into the order of the data set.

Micro-batches come in any order, of any lengths, from several replicas, with rows that only fill up. Kept are whole micro-batches;
rows are taken apart once, at the end, on the one rank that looks at them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["Chunk", "Place", "in_order"]

Place = tuple[int, int] | None
"""What a row sorts by; None for one that only fills up."""

Arrays = tuple[np.ndarray[Any, Any], ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A micro-batch, on the host.

    Attributes:
        places: one per row.
        outputs, labels: arrays `[rows, ...]`.
        tuples: whether `outputs` and `labels` were tuples of tensors.

    """

    places: tuple[Place, ...]
    outputs: Arrays
    labels: Arrays
    tuples: tuple[bool, bool]

    @classmethod
    def of(cls, places: Sequence[Place], outputs: Any, labels: Any) -> Chunk:
        """Copy a micro-batch to the host.

        Raises:
            TypeError: outputs or labels are no tensors.
            ValueError: they do not have one row per sample.

        """
        tuples = (isinstance(outputs, tuple | list), isinstance(labels, tuple | list))
        return cls(tuple(places), _as_arrays(outputs, len(places), "outputs"), _as_arrays(labels, len(places), "labels"), tuples)


def _as_arrays(value: Any, rows: int, name: str) -> Arrays:
    """A tensor or a tuple of tensors as arrays; there are none of bf16.

    Raises:
        TypeError: it is no tensor.
        ValueError: it does not have so many rows.

    """
    parts = tuple(value) if isinstance(value, tuple | list) else (value,)
    for part in parts:
        if not isinstance(part, Tensor):
            raise TypeError(f"metrics need the {name} as a tensor or a tuple of tensors, got a {type(part).__name__}")
        if part.dim() == 0 or len(part) != rows:
            raise ValueError(
                f"metrics need {name} with one row per sample, [{rows}, ...] here, got {list(part.shape)}: let the model, or "
                "reduce_outputs, keep the rows"
            )
    # Copied: a view of logits would keep all of them.
    return tuple(np.array((part.float() if part.dtype == torch.bfloat16 else part).detach().cpu().numpy()) for part in parts)


def in_order(chunks: Iterable[Chunk]) -> tuple[Any, Any]:
    """Predictions and labels of all samples, sorted by their places.

    Returns:
        Each as an array `[samples, ...]`, or as a list of arrays where samples have different shapes; a tuple of those where the
        model gives a tuple.

    Raises:
        ValueError: a sample came twice, or the kinds of outputs change.

    """
    chunks = list(chunks)
    rows = sorted(
        (place, number, row) for number, chunk in enumerate(chunks) for row, place in enumerate(chunk.places) if place is not None
    )
    for (place, *_), (following, *_) in zip(rows, rows[1:], strict=False):
        if place == following:
            raise ValueError(f"sample {place[1]} came twice: give None in `samples` for rows that only fill up a micro-batch")
    if len({(chunk.tuples, len(chunk.outputs), len(chunk.labels)) for chunk in chunks}) > 1:
        raise ValueError("metrics need the same number of outputs and labels in each micro-batch")
    found = [(chunks[number], row) for _, number, row in rows]
    if not found:
        raise ValueError("metrics need at least one sample, but every row only fills up")
    predictions = [_joined([chunk.outputs[part][row] for chunk, row in found]) for part in range(len(chunks[0].outputs))]
    labels = [_joined([chunk.labels[part][row] for chunk, row in found]) for part in range(len(chunks[0].labels))]
    outputs_are_tuple, labels_are_tuple = chunks[0].tuples
    return (
        tuple(predictions) if outputs_are_tuple else predictions[0],
        tuple(labels) if labels_are_tuple else labels[0],
    )


def _joined(rows: list[Any]) -> Any:
    return np.stack(rows) if len({row.shape for row in rows}) == 1 else rows
