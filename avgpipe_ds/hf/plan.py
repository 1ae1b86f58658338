"""What a Hugging Face model looks like as a row of pipeline layers.

A plan is pure description: which layers there are, how each is built, and which tensors of a transformers checkpoint are its
own. Partitioning, loading, counting and exporting all read the same plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deepspeed.pipe import LayerSpec, TiedLayerSpec

from avgpipe_ds.hf.families import Family
from avgpipe_ds.hf.layers import After, Before, Block, CallFinder, Words, hand_on_weight
from avgpipe_ds.hf.shell import max_positions, own_names, own_shapes
from avgpipe_ds.hf.skeleton import Skeleton, only_after, only_before

__all__ = [
    "LayerPlan",
    "check_plan",
    "checkpoint_name",
    "cuts_of",
    "first_layer_of",
    "module_prefix",
    "parameter_counts",
    "plan_layers",
]

_WORDS = "words"
"""Key of the tied word embedding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlan:
    """One layer of the pipeline.

    Attributes:
        spec: how DeepSpeed builds the layer; a `TiedLayerSpec` shares its module with the other layers of the same key.
        own_prefix: what the names of its tensors begin with in the layer, ...
        checkpoint_prefix: ... and in transformers' model, which names them alike otherwise.
        tensors: names in transformers' model of those that it has.
        is_lookup: the layer only looks rows up in tables: parameters, but no arithmetic worth balancing.
        glued: to the next layer: no stage may end here, for what passes on is large, or is nobody's business elsewhere.

    """

    spec: LayerSpec
    own_prefix: str
    checkpoint_prefix: str
    tensors: frozenset[str]
    is_lookup: bool = False
    glued: bool = False

    def checkpoint_name(self, name: str) -> str:
        """Name in the transformers model of the layer's own tensor `name`."""
        if not name.startswith(self.own_prefix):
            raise KeyError(f"expected a tensor of the layer, {self.own_prefix}..., got {name!r}")
        return self.checkpoint_prefix + name.removeprefix(self.own_prefix)


def plan_layers(shell: Any, family: Family, finder: CallFinder) -> list[LayerPlan]:
    """The layers of a model from ids to logits; together they have every tensor of it once, but for a tied word embedding.

    Args:
        shell: the model on the meta device.
        family: its architecture.
        finder: tells the blocks how they are called.

    """
    names, base = own_names(shell), shell.base_model_prefix + "."
    words = shell.get_input_embeddings()
    words_path = next(path for path, module in shell.named_modules() if module is words) + "."
    aliases = {alias for alias, name in shell.all_tied_weights_keys.items() if name == f"{words_path}weight"}

    def inside(skeleton: Skeleton, prefix: str) -> frozenset[str]:
        return frozenset(prefix + name for name in skeleton.model.state_dict()) & names

    before, after = only_before(shell, family), only_after(shell, family, aliases)
    word_arguments = (words, max_positions(shell.config))
    if aliases:
        weight = ["embedding.weight"]
        words_spec = TiedLayerSpec(_WORDS, Words, *word_arguments, tied_weight_attr=weight)
    else:
        words_spec = LayerSpec(Words, *word_arguments)
    words_plan = LayerPlan(
        spec=words_spec,
        own_prefix="embedding.",
        checkpoint_prefix=words_path,
        tensors=frozenset(name for name in names if name.startswith(words_path)),
        is_lookup=True,
        glued=True,
    )
    layers = [
        words_plan,
        LayerPlan(
            spec=LayerSpec(Before, before, family),
            own_prefix="skeleton.model.",
            checkpoint_prefix=base,
            tensors=inside(before, base),
            is_lookup=True,
        ),
    ]
    for index, block in enumerate(shell.base_model.get_submodule(family.blocks)):
        prefix = f"{base}{family.blocks}.{index}."
        layers.append(
            LayerPlan(
                spec=LayerSpec(Block, block, index, finder),
                own_prefix="layer.",
                checkpoint_prefix=prefix,
                tensors=frozenset(name for name in names if name.startswith(prefix)),
            )
        )
    if aliases:
        spec = TiedLayerSpec(_WORDS, Words, *word_arguments, forward_fn=hand_on_weight, tied_weight_attr=weight)
        layers.append(
            LayerPlan(spec=spec, own_prefix="embedding.", checkpoint_prefix=words_path, tensors=words_plan.tensors, glued=True)
        )
    layers.append(
        LayerPlan(
            spec=LayerSpec(After, after, sorted(aliases), shell.config.pad_token_id),
            own_prefix="skeleton.model.",
            checkpoint_prefix="",
            tensors=inside(after, ""),
        )
    )
    return layers


def cuts_of(plan: Sequence[LayerPlan]) -> list[int]:
    """The layer numbers at which a stage may begin, and the end."""
    return [0, *(index for index in range(1, len(plan) + 1) if not plan[index - 1].glued)]


def check_plan(plan: Sequence[LayerPlan], shell: Any) -> None:
    """Raise `RuntimeError` if the layers of `plan` and the tensors of the model do not match: the family is wrong then."""
    unplanned = own_names(shell) - frozenset().union(*(layer.tensors for layer in plan))
    if unplanned:
        raise RuntimeError(
            f"what is known of {shell.config.model_type!r} does not match {type(shell).__name__}: no layer has "
            f"{sorted(unplanned)[:5]}"
        )


def parameter_counts(plan: Sequence[LayerPlan], shell: Any) -> list[int]:
    """Parameters of each layer, frozen or not; a tied one counts in every layer that uses it."""
    shapes = own_shapes(shell)
    return [sum(shapes[name].numel() for name in layer.tensors) for layer in plan]


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

    `"3.layer.output.dense.bias"` is `"bert.encoder.layer.1.output.dense.bias"`, `"tied_modules.words.embedding.weight"` is
    `"transformer.wte.weight"`.
    """
    index = first_layer_of(plan, module_name)
    return plan[index].checkpoint_name(module_name.removeprefix(module_prefix(plan, index)))
