"""What a loss function gave for the micro-batches of a batch: the loss to train on, and numbers to report beside it.

Nothing here waits for the device before the batch is over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["LOSS", "LossRecord", "Losses", "mean_of", "split_loss"]

LOSS = "loss"
"""The name of what is trained on."""

Losses = dict[str, float]
"""Means by name: `LOSS`, and what is reported beside it."""


class LossRecord:
    """The losses and metrics of one pipeline's batch, on the last stage. The names are those of the first micro-batch ever."""

    def __init__(self) -> None:
        self._micro_batches: list[dict[str, Tensor]] = []
        self._names: set[str] | None = None

    def begin(self) -> None:
        """A new batch."""
        self._micro_batches = []

    def add(self, returned: Any, additional: Mapping[str, Tensor]) -> Tensor:
        """Note what the next micro-batch gave.

        Args:
            returned: by the loss function: a scalar, or a pair of it and a mapping of names to scalars.
            additional: `PipelineModule.get_additional_losses`.

        Returns:
            The loss, with its graph.

        Raises:
            ValueError: it is something else, depends on no parameter, or reports under other names than before.

        """
        loss, metrics = split_loss(returned)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ValueError(
                f"the loss must be a scalar tensor, got {_described(loss)}: let loss_fn return one number, such as its mean, "
                "or a pair of it and a dictionary of numbers to report"
            )
        if not loss.requires_grad:
            raise ValueError("the loss does not depend on any trainable parameter of any stage: is everything frozen?")
        values = {LOSS: loss.detach().clone()} | {name: _number(name, value, loss.device) for name, value in metrics.items()}
        if taken := sorted(values.keys() & additional.keys()):
            raise ValueError(f"get_additional_losses() of the module gives {taken}, too, as loss_fn does: rename one of them")
        values |= {name: value.detach().clone() for name, value in additional.items()}
        self._names = set(values) if self._names is None else self._names
        _check_names([self._names, set(values)], "before", "now")
        self._micro_batches.append(values)
        return loss

    @property
    def losses(self) -> Tensor:
        """The loss of each micro-batch so far."""
        return torch.stack([values[LOSS].reshape(()) for values in self._micro_batches])

    def means(self) -> Losses:
        """Over the batch, summed as DeepSpeed sums losses. On a GPU this waits for the device, once."""
        names, means = list(self._micro_batches[0]), []
        for name in names:
            total = torch.zeros_like(self._micro_batches[0][name])
            for values in self._micro_batches:
                total += values[name]
            means.append((total / len(self._micro_batches)).reshape(()).double())
        return dict(zip(names, torch.stack(means).tolist(), strict=True))


def split_loss(returned: Any) -> tuple[Any, Mapping[str, Any]]:
    """What a loss function returned as the loss and what is reported beside it; neither is checked."""
    if isinstance(returned, tuple | list) and len(returned) == 2 and isinstance(returned[1], Mapping):
        return returned[0], returned[1]
    return returned, {}


def mean_of(every: Sequence[Losses]) -> Losses:
    """The mean over replicas, or over pipelines.

    Raises:
        ValueError: they report under different names.

    """
    for other in every[1:]:
        _check_names([set(every[0]), set(other)], "in one place", "in another")
    return {name: sum(losses[name] for losses in every) / len(every) for name in every[0]}


def _number(name: Any, value: Any, device: torch.device) -> Tensor:
    if not isinstance(name, str) or name == LOSS:
        raise ValueError(f"loss_fn reports {_described(value)} as {name!r}: take a string, other than {LOSS!r}")
    if isinstance(value, int | float):
        return torch.tensor(float(value), device=device)
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise ValueError(f"loss_fn reports {_described(value)} as {name!r}: let it be one number, such as its mean")
    return value.detach().reshape(()).to(device, torch.float32, copy=True)


def _check_names(names: Sequence[set[str]], here: str, there: str) -> None:
    if names[0] != names[1]:
        first, second = (sorted(some - {LOSS}) for some in names)
        raise ValueError(f"loss_fn must report under the same names each time, but it reports {first} {here}, {second} {there}")


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of ({', '.join(_described(part) for part in value)})"
    return "None" if value is None else f"a {type(value).__name__}"
