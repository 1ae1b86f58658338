"""What a Hugging Face model looks like as a row of pipeline layers.

A plan is pure description: which layers there are, how each is built, and where its tensors live in a transformers
checkpoint. Partitioning, loading, counting and exporting all read the same plan, so a family states each fact once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor

Task = Literal["sequence-classification", "causal-lm"]

#: What one layer hands to the next: `(hidden_states, attention_mask, *context)`; see `layers.Block`.
Flow = tuple[Any, ...]

#: Tensors that blocks share within one stage, derived from `hidden_states` and `attention_mask`; a family gives them meaning.
Context = tuple[Tensor | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlan:
    """One layer of the pipeline.

    Attributes:
        spec: how DeepSpeed builds the layer; a `TiedLayerSpec` shares its module with the other layers of the same key.
        names: prefix inside the layer -> prefix in the transformers model, e.g. `{"layer.": "bert.encoder.layer.0."}`.
        is_head: a task head: a checkpoint may lack its weights, they are then initialised.
        is_lookup: the layer only looks rows up in tables: parameters, but no arithmetic worth balancing.

    """

    spec: LayerSpec
    names: Mapping[str, str]
    is_head: bool = False
    is_lookup: bool = False

    def checkpoint_name(self, name: str) -> str:
        """Name in the transformers model of the layer's own tensor `name`."""
        for prefix, target in self.names.items():
            if name.startswith(prefix):
                return target + name.removeprefix(prefix)
        raise KeyError(
            f"no transformers name is planned for tensor {name!r} of {self.spec!r}; planned prefixes: {list(self.names)}"
        )

    def holds(self, checkpoint_name: str) -> bool:
        """Whether the tensor with this name in the transformers model is part of the layer."""
        return checkpoint_name.startswith(tuple(self.names.values()))


def module_prefix(plan: Sequence[LayerPlan], index: int) -> str:
    """Prefix of layer `index` in the state dict of the `PipelineModule`: `"3."`, or `"tied_modules.<key>."`."""
    spec = plan[index].spec
    return f"tied_modules.{spec.key}." if isinstance(spec, TiedLayerSpec) else f"{index}."


def first_layer_of(plan: Sequence[LayerPlan], module_name: str) -> int:
    """Index of the first layer that owns `module_name`, a name in the state dict of the `PipelineModule`."""
    for index in range(len(plan)):
        if module_name.startswith(module_prefix(plan, index)):
            return index
    raise KeyError(f"{module_name!r} belongs to none of the pipeline's {len(plan)} layers")


def checkpoint_name(plan: Sequence[LayerPlan], module_name: str) -> str:
    """Transformers' name of a tensor in the pipeline's state dict.

    `"3.layer.output.dense.bias"` is `"bert.encoder.layer.2.output.dense.bias"`, `"tied_modules.embed.weight"` is
    `"transformer.wte.weight"`.
    """
    index = first_layer_of(plan, module_name)
    return plan[index].checkpoint_name(module_name.removeprefix(module_prefix(plan, index)))
