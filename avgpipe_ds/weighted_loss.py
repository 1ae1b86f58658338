"""Losses over samples that carry weights, and what a mean over a data set needs of them.

A training loss is averaged over the M micro-batches of a batch, whatever their sizes; so the loss of a micro-batch is a weighted
*sum*, and who makes the batches chooses weights that make the average the mean wanted. An evaluation does not know beforehand
how much there is to average over: it adds up losses and targets and divides at the end. Both follow from what one sample costs
and how many targets it has, which is all that a loss has to say.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

from torch import Tensor

__all__ = ["Labels", "SampleLosses", "Totals", "WeightedLoss", "split_labels"]

Labels = Tensor | tuple[Tensor, Tensor]
"""Targets `[batch, ...]`, or a pair of them and fp32 weights `[batch]`."""


class SampleLosses(NamedTuple):
    """What the samples of a micro-batch cost.

    Attributes:
        losses: fp32 `[batch]`, the *sum* over the targets of each sample.
        counts: fp32 `[batch]`, how many targets each has.

    """

    losses: Tensor
    counts: Tensor


class Totals(NamedTuple):
    """Of a micro-batch: the sum of its losses and of its targets, scalars, each sample times its weight if it has one.

    Their quotient is the mean over targets; over a data set, the quotient of their sums is.
    """

    loss: Tensor
    num_targets: Tensor


class WeightedLoss(ABC):
    """A `loss_fn(outputs, labels)` of samples that may carry weights.

    Labels with weights give the *sum* over the samples of `weight * loss`; plain labels give the mean over the micro-batch's
    targets, as in transformers. Derive from it for a loss of your own: it must survive copying and pickling.
    """

    @abstractmethod
    def of_samples(self, outputs: Any, targets: Tensor) -> SampleLosses:
        """What each sample costs.

        Args:
            outputs: of the model.
            targets: `[batch, ...]`.

        """

    def totals(self, outputs: Any, labels: Labels) -> Totals:
        """The sums over a micro-batch, for a mean over several."""
        targets, weight = split_labels(labels)
        losses, counts = self.of_samples(outputs, targets)
        if weight is not None:
            losses, counts = losses * weight, counts * weight
        return Totals(losses.sum(), counts.sum())

    def __call__(self, outputs: Any, labels: Labels) -> Tensor:
        """The loss of a micro-batch, a scalar."""
        loss, num_targets = self.totals(outputs, labels)
        return loss / num_targets if isinstance(labels, Tensor) else loss


def split_labels(labels: Any) -> tuple[Tensor, Tensor | None]:
    """Targets, and weights if there are any.

    Raises:
        TypeError: neither a tensor nor a pair.

    """
    if isinstance(labels, Tensor):
        return labels, None
    if not isinstance(labels, tuple | list) or len(labels) != 2:
        size = f" of length {len(labels)}" if isinstance(labels, tuple | list) else ""
        raise TypeError(f"expected labels as a tensor or a pair (labels, weight[batch]), got a {type(labels).__name__}{size}")
    return labels[0], labels[1]
