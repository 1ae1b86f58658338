"""What can be wrong with a micro-batch that fits a model's code."""

from __future__ import annotations

from typing import Any

from torch import Tensor

__all__ = ["attended_padding", "impossible_classes", "lost_samples"]

_IGNORED = -100
"""Torch's own mark of a target that does not count."""


def impossible_classes(outputs: Any, labels: Any) -> str | None:
    """What is wrong with class ids that the model's output has no place for.

    Args:
        outputs: of the last layer; looked at if it is a float tensor `[..., classes]`.
        labels: a tensor, or a tuple whose first is looked at, if it holds integers `[...]`.

    """
    classes = labels[0] if isinstance(labels, tuple) and labels else labels
    if not isinstance(outputs, Tensor) or not isinstance(classes, Tensor) or not outputs.is_floating_point():
        return None
    number = outputs.shape[-1] if outputs.dim() else 0
    if number < 2 or classes.is_floating_point() or classes.shape != outputs.shape[:-1]:
        return None
    wrong = classes[((classes < 0) | (classes >= number)) & (classes != _IGNORED)]
    if not wrong.numel():
        return None
    return (
        f"labels from {wrong.min().item()} to {wrong.max().item()}, but the model has the classes 0 to {number - 1} and"
        f" {_IGNORED} for no target: give the head more (num_labels), or map the labels"
    )


def attended_padding(inputs: Any, config: Any) -> str | None:
    """What is wrong with samples that begin or end with padding that the mask does not hide.

    Args:
        inputs: `(input_ids, attention_mask, ...)`, int64 `[batch, length]`.
        config: transformers'; a padding token that also ends or begins texts says nothing.

    """
    pad = getattr(config, "pad_token_id", None)
    if pad is None or not isinstance(inputs, tuple) or len(inputs) < 2 or pad in _text_ids(config):
        return None
    ids, mask = inputs[:2]
    if ids.dim() != 2 or ids.shape != mask.shape or not ids.shape[1]:
        return None
    ends = (ids[:, [0, -1]] == pad) & (mask[:, [0, -1]] != 0)
    number = int(ends.any(dim=1).sum())
    if not number:
        return None
    return (
        f"{number} of {len(ids)} samples begin or end with the padding token ({pad}) where attention_mask is not 0, so the model"
        " attends to padding: give the attention_mask of the tokenizer"
    )


def lost_samples(samples: int, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> bool:
    """Whether tensors of a micro-batch come in, and none goes out: no dimension is `samples`, nor begins with all samples'
    positions in a row, as in `[batch * length, width]`.
    """
    comes = [value.shape for value in inputs if isinstance(value, Tensor) and value.dim() and value.shape[0] == samples]
    goes = [value.shape for value in outputs if isinstance(value, Tensor)]
    if not comes or not goes:
        return False
    flattened = {shape[:depth].numel() for shape in comes for depth in range(1, len(shape) + 1)}
    return not any(samples in shape or (len(shape) and shape[0] in flattened) for shape in goes)


def _text_ids(config: Any) -> set[int]:
    """Tokens that texts have, too."""
    found: set[int] = set()
    for name in ("bos_token_id", "eos_token_id"):
        value = getattr(config, name, None)
        found |= set(value if isinstance(value, list | tuple) else () if value is None else (value,))
    return found
