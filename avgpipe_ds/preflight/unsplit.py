"""The same micro-batch in transformers' own model on one process: what the pipeline computes must be the same.

Nothing but the names of weights is taken from the pipeline, so this is a check of the whole way from loading to gradients.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from avgpipe_ds.execution.loss_record import split_loss
from avgpipe_ds.preflight.neighbours import Neighbours
from avgpipe_ds.preflight.report import Comparison
from avgpipe_ds.preflight.stage_check import Subject

__all__ = ["compare_at_home", "send_stage_home"]

_TOLERANCE = 1e-4
"""In fp32, relative: sums are taken in another order, and thousands of them add up."""

_LABELS, _WEIGHTS = "labels", "weights"


def send_stage_home(subject: Subject, neighbours: Neighbours) -> None:
    """A stage other than the first hands over its weights, and the last one the labels."""
    tensors, trainable = _own_tensors(subject)
    neighbours.send_home(_WEIGHTS, (list(tensors), trainable), list(tensors.values()))
    if neighbours.is_last:
        labels = subject.labels
        parts = labels if isinstance(labels, tuple) else () if labels is None else (labels,)
        neighbours.send_home(_LABELS, None if labels is None else isinstance(labels, tuple), parts)


def compare_at_home(subject: Subject, neighbours: Neighbours, *, loss: float, norm: float) -> Comparison:
    """On the first stage: gather the model, run it, and compare.

    Args:
        subject: of this stage.
        neighbours: of its replica.
        loss: of the pipeline, without dropout.
        norm: of all its gradients.

    Raises:
        Exception: the whole model can't be built, or can't compute this.

    """
    tensors, trainable = _own_tensors(subject)
    for message in neighbours.from_others(_WEIGHTS):
        names, theirs = message.payload
        tensors |= dict(zip(names, message.tensors, strict=True))
        trainable |= theirs
    labels = subject.labels
    if not neighbours.is_last:
        message = neighbours.from_stage(neighbours.last_stage, _LABELS)
        parts = tuple(part.to(subject.device) for part in message.tensors)
        labels = None if message.payload is None else parts if message.payload else parts[0]
    with torch.random.fork_rng(devices=[]):
        model = _whole_model(subject.module, tensors, trainable).to(subject.device)
    with torch.enable_grad():
        whole_loss, whole_norm = _run(model, subject, labels)
    tolerance = _TOLERANCE if subject.exact else None
    return Comparison(loss=loss, whole_loss=whole_loss, norm=norm, whole_norm=whole_norm, tolerance=tolerance)


def _own_tensors(subject: Subject) -> tuple[dict[str, Tensor], set[str]]:
    """What this stage speaks for, under transformers' names, and which of it trains."""
    module: Any = subject.module
    trained = {name for name, weight in module.named_parameters(remove_duplicate=False) if weight.requires_grad}
    own = {
        name: tensor
        for name, tensor in module.state_dict().items()
        if module.owns(name) and module.first_stage_of(name) == module.stage_id
    }
    return {module.checkpoint_name(name): t for name, t in own.items()}, {module.checkpoint_name(n) for n in own if n in trained}


def _whole_model(module: Any, tensors: Mapping[str, Tensor], trainable: set[str]) -> Any:
    """Transformers' model with these very tensors, which are not copied; with adapters, as peft puts them in."""
    from avgpipe_ds.hf.adapters import Adapters
    from avgpipe_ds.hf.tasks import auto_class

    config = copy.deepcopy(module.hf_config)
    dtype = next(tensor.dtype for tensor in tensors.values() if tensor.is_floating_point())
    model: Any = auto_class(module.task).from_config(config, dtype=dtype, attn_implementation=config._attn_implementation)
    if module.adapters is not None:
        Adapters(module.adapters.config).inject(model, module.task)
    missing, unexpected = model.load_state_dict(tensors, strict=False, assign=True)
    missing = set(missing) - set(model.all_tied_weights_keys)
    if missing or unexpected:
        raise ValueError(f"transformers' model lacks {sorted(unexpected)}, the pipeline lacks {sorted(missing)}")
    model.tie_weights()
    for name, weight in model.named_parameters():
        weight.requires_grad_(name in trainable)
    return model.eval()


def _run(model: Any, subject: Subject, labels: Any) -> tuple[float, float]:
    """Loss, and the norm of all gradients."""
    from avgpipe_ds.hf.families import family_of

    ids, mask, *third = subject.inputs
    optional = dict(zip([family_of(model.config).third_input], third, strict=False))
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False, **optional).logits
    assert subject.loss_fn is not None
    loss, _ = split_loss(subject.loss_fn(logits, labels))
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    gradients = torch.autograd.grad(loss, weights, allow_unused=True)
    squares = sum(float(gradient.double().square().sum()) for gradient in gradients if gradient is not None)
    return float(loss.detach()), math.sqrt(squares)
