"""The transformers model without storage.

Built on the meta device in milliseconds, it knows the shape of every tensor, which names are tied, how weights are
initialised and which attention is used. So transformers itself stays the authority on all of these.
"""

from __future__ import annotations

from typing import Any

import torch

from avgpipe_ds.hf.tasks import Task, auto_class

__all__ = ["build_shell", "max_positions", "own_names", "own_shapes"]


def build_shell(
    config: Any, task: Task, dtype: torch.dtype, attn_implementation: str | None = None, *, trust_remote_code: bool = False
) -> Any:
    """The `PreTrainedModel` of `config` for `task`, all tensors on the meta device.

    Raises:
        ValueError: transformers has no such model for the task.

    """
    attention = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    factory = auto_class(task)
    brings_code = trust_remote_code and factory.__name__ in (getattr(config, "auto_map", None) or {})
    if type(config) not in factory._model_mapping and not brings_code:
        raise ValueError(f"transformers has no {config.model_type} for {task!r} ({factory.__name__}): choose another task")
    with torch.device("meta"):
        return factory.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code, **attention)


def own_shapes(shell: Any) -> dict[str, torch.Size]:
    """Name -> shape of every tensor of the model; tied tensors appear once, under the name that transformers saves."""
    tied = shell.all_tied_weights_keys
    return {name: tensor.shape for name, tensor in shell.state_dict().items() if name not in tied}


def own_names(shell: Any) -> frozenset[str]:
    """The names of `own_shapes`."""
    return frozenset(own_shapes(shell))


def max_positions(config: Any) -> int:
    """Tokens of the longest sequence. Models of the RoBERTa kind begin to count behind their padding token."""
    positions: int = config.max_position_embeddings
    return (
        positions - config.pad_token_id - 1 if "roberta" in config.model_type or config.model_type == "camembert" else positions
    )
