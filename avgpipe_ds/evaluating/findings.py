"""What the last stage notes of each micro-batch: sums of the loss, and what metrics will look at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from avgpipe_ds.evaluating.predictions import Chunk, Place
from avgpipe_ds.evaluating.request import Request
from avgpipe_ds.execution.loss_record import split_loss
from avgpipe_ds.weighted_loss import Totals, WeightedLoss, split_labels

__all__ = ["Findings", "Samples"]

Samples = Sequence[int | None]
"""The place in the data set of each row of a micro-batch; None for one that only fills up."""


@dataclass(slots=True)
class Findings:
    """Of one model.

    Attributes:
        request: what was asked for.
        replica_id: which data-parallel replica this rank belongs to.
        loss, num_targets: sums; on the device, for looking at them would wait for it.
        chunks: what metrics will look at.

    """

    request: Request
    replica_id: int
    loss: Any = 0.0
    num_targets: Any = 0.0
    chunks: list[Chunk] = field(default_factory=list)
    _num_rows: int = 0

    def add(self, loss_fn: Any, outputs: Any, labels: Any, samples: Samples | None) -> None:
        """The next micro-batch.

        Args:
            loss_fn: of the model; None if its outputs are the loss.
            outputs: a tensor, or a tuple of tensors.
            labels: the same.
            samples: None for their order.

        Raises:
            ValueError, TypeError: rows, samples and labels do not fit together, or the loss is no scalar.
            Exception: as `loss_fn` or `reduce_outputs` raise.

        """
        targets, weight = split_labels(labels) if isinstance(loss_fn, WeightedLoss) else (labels, None)
        places = self._places(_rows_of(targets), weight, samples)
        totals = _totals(loss_fn, outputs, labels, sum(place is not None for place in places))
        self.loss += totals.loss.detach().double()
        self.num_targets += totals.num_targets.detach().double()
        if self.request.metrics is not None:
            reduce_outputs = self.request.reduce_outputs
            kept = outputs if reduce_outputs is None else reduce_outputs(outputs, targets)
            self.chunks.append(Chunk.of(places, kept, targets))

    def _places(self, rows: int | None, weight: Tensor | None, samples: Samples | None) -> list[Place]:
        if samples is not None:
            if rows is not None and rows != len(samples):
                raise ValueError(f"samples gives the places of {len(samples)} rows for a micro-batch of {rows}")
            return [None if place is None else (0, int(place)) for place in samples]
        first, rows = self._num_rows, rows or 1
        self._num_rows += rows
        fills_up = [False] * rows if weight is None else (weight == 0).tolist()
        return [None if fills else (self.replica_id, first + row) for row, fills in enumerate(fills_up)]


def _totals(loss_fn: Any, outputs: Any, labels: Any, rows: int) -> Totals:
    """The loss of a micro-batch as sums. One that is no `WeightedLoss` is taken as a mean over rows."""
    if isinstance(loss_fn, WeightedLoss):
        return loss_fn.totals(outputs, labels)
    loss, _ = split_loss(outputs if loss_fn is None else loss_fn(outputs, labels))
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise ValueError(f"evaluate() averages scalar losses, got {found} from loss_fn")
    return Totals(loss.reshape(()) * rows, torch.tensor(float(rows)))


def _rows_of(targets: Any) -> int | None:
    """How many rows the labels have, if there are any."""
    first = next(iter(targets), None) if isinstance(targets, tuple | list) else targets
    return len(first) if isinstance(first, Tensor) and first.dim() else None
