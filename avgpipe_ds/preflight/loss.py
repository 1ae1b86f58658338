"""The loss of the micro-batch that is checked."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from avgpipe_ds.execution.loss_record import LossRecord, split_loss
from avgpipe_ds.execution.tensors import as_tuple
from avgpipe_ds.preflight.data import impossible_classes
from avgpipe_ds.preflight.graph import nodes_of, reaches
from avgpipe_ds.preflight.observe import Observer, is_finite

__all__ = ["LossFn", "checked_loss"]

_WHERE = "loss"

LossFn = Callable[[Any, Any], Any]
"""Of (outputs, labels)."""


def checked_loss(outputs: Any, labels: Any, loss_fn: LossFn | None, observer: Observer, device: torch.device) -> Tensor | None:
    """The loss, if a backward can start from it; what is wrong is told to the observer.

    Args:
        outputs: of the last layer; the loss itself if there is no `loss_fn`.
        labels: as the data has them.
        loss_fn: of (outputs, labels).
        observer: of the stage.
        device: on a GPU an index out of range ends the process, so there the loss of such labels is not computed.

    Raises:
        Exception: what `loss_fn` raises, unless the labels explain it.

    """
    returned = outputs
    observer.where = _WHERE
    if loss_fn is not None:
        classes = impossible_classes(outputs, labels)
        try:
            if classes is not None and device.type == "cuda":
                raise IndexError("not computed")
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                returned = loss_fn(outputs, labels)
        except Exception as error:
            if classes is None:
                raise
            observer.report("error", f"{classes} ({type(error).__name__}: {error})", where="data")
            return None
        for warning in said:
            observer.report("warning", str(warning.message))
        if classes is not None:
            observer.report("warning", classes, where="data")
    loss, _ = split_loss(returned)
    if not _is_fit(loss, outputs, observer):
        return None
    try:
        return LossRecord().add(returned, {})
    except ValueError as error:  # what is reported beside the loss
        observer.report("error", str(error))
        return None


def _is_fit(loss: Any, outputs: Any, observer: Observer) -> bool:
    """Whether a backward can start from the loss."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        observer.report("error", f"it must be a scalar tensor, got {found}: let loss_fn return one number, such as a mean")
        return False
    value = float(loss.detach())
    if not math.isfinite(value) and all(map(is_finite, as_tuple(outputs))):
        observer.report("error", f"it is {value}, of finite outputs: is it a mean over no targets?")
    came = nodes_of(as_tuple(outputs))
    if came and not reaches((loss,), came):
        observer.report("error", "it does not depend on the outputs of the model for autograd: nothing learns")
    elif not loss.requires_grad:
        observer.report("error", "it does not depend on any parameter that trains: nothing learns. Is everything frozen?")
    return loss.requires_grad
