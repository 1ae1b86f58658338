"""What layers and parameters are called: in a Hugging Face model as in transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from avgpipe_ds import deepspeed_compat as compat

__all__ = ["Names", "common_path"]


class Names:
    """Names of one stage.

    Args:
        module: of the stage. If it has `checkpoint_name`, as those of `avgpipe_ds.hf` have, its parameters are named by it.

    """

    def __init__(self, module: compat.PipelineModule) -> None:
        translate: Callable[[str], str] | None = getattr(module, "checkpoint_name", None)
        self._translated = translate is not None
        self._by_id = {
            id(weight): name if translate is None or name == compat.PLACEHOLDER else translate(name)
            for name, weight in module.named_parameters()
        }

    def parameter(self, weight: Any) -> str:
        """Of a parameter of the stage; other tensors have none."""
        return self._by_id.get(id(weight), "")

    def path(self, function: Callable[[Any], Any]) -> str:
        """Where transformers has a layer; empty if the model is no Hugging Face model, or the layer has no weights."""
        if not self._translated:
            return ""
        return common_path([name for weight in compat.weights_of(function) if (name := self.parameter(weight))])


def common_path(names: Sequence[str]) -> str:
    """The module that all these parameters are in; if there is none, the outermost ones of each."""
    modules = [name.split(".")[:-1] for name in names]
    if not modules:
        return ""
    common = []
    for parts in zip(*modules, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common) or ", ".join(dict.fromkeys(name.split(".")[0] for name in names))
