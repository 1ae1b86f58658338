"""The transformers model without storage.

Built on the meta device in milliseconds, it knows the shape of every tensor, which names are tied, how weights are
initialised and which attention is used. So transformers itself stays the authority on all of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from avgpipe_ds.hf.plan import LayerPlan, Task

_AUTO_CLASSES: dict[Task, Any] = {
    "sequence-classification": AutoModelForSequenceClassification,
    "causal-lm": AutoModelForCausalLM,
}


def build_shell(config: Any, task: Task, dtype: torch.dtype, attn_implementation: str | None = None) -> Any:
    """The `PreTrainedModel` of `config` for `task`, all tensors on the meta device."""
    attention = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    with torch.device("meta"):
        return _AUTO_CLASSES[task].from_config(config, dtype=dtype, **attention)


def own_shapes(shell: Any) -> dict[str, torch.Size]:
    """Name -> shape of every tensor of the model; tied tensors appear once, under the name that transformers saves."""
    tied = shell.all_tied_weights_keys
    return {name: tensor.shape for name, tensor in shell.state_dict().items() if name not in tied}


def check_plan(plan: Sequence[LayerPlan], shell: Any) -> None:
    """Raise `RuntimeError` if the layers of `plan` and the tensors of the model do not match: the adapter is wrong then."""
    names = own_shapes(shell)
    unplanned = [name for name in names if not any(layer.holds(name) for layer in plan)]
    empty = [index for index, layer in enumerate(plan) if not any(layer.holds(name) for name in names)]
    if unplanned or empty:
        raise RuntimeError(
            f"the adapter for {shell.config.model_type!r} does not match {type(shell).__name__}: "
            f"no layer holds {unplanned[:5]}, and layers {empty} hold no tensor of the model"
        )


def parameter_counts(plan: Sequence[LayerPlan], shell: Any) -> list[int]:
    """Parameters of each layer, frozen or not; a tied one counts in every layer that uses it."""
    shapes = own_shapes(shell)
    return [sum(shape.numel() for name, shape in shapes.items() if layer.holds(name)) for layer in plan]
