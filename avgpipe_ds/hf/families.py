"""What has to be known of an architecture to cut it into stages: where its blocks are, and what runs before them.

That is all. Masks, positions, embeddings, norms and heads are computed by transformers' own code; see `skeleton`. Decoders
whose config has a `base_model_pp_plan` say even that by themselves, so those that are yet to come need nothing here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

from transformers import PretrainedConfig

__all__ = ["Family", "Role", "family_of", "supported_model_types"]


class Role(Enum):
    """What becomes of a module that runs before the blocks, where only the blocks or what follows them is wanted."""

    HIDDEN = "it makes the hidden states: there they are given"
    ADDED = "its output is added to the hidden states: there it is zero"
    SAME = "it changes the hidden states: there it does not"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """An architecture. Paths are those of modules in transformers' base model, such as `BertModel`.

    Attributes:
        blocks: the list of blocks.
        before: what runs before them, with parameters or dropout, in order.
        third_input: what a micro-batch may have beside ids and mask. Position ids travel, since all blocks want them.
        shared: a keyword argument of all blocks that is computed from weights before the first one; it travels.
        returns_tuple: blocks return `(hidden_states, ...)`.
        check: raises `ValueError` for a config of this family that can't be a pipeline.

    """

    blocks: str
    before: Mapping[str, Role]
    third_input: Literal["token_type_ids", "position_ids"] = "token_type_ids"
    shared: str | None = None
    returns_tuple: bool = False
    check: Callable[[Any], None] = lambda config: None


def _refuse(**wanted: Any) -> Callable[[Any], None]:
    """A check that these attributes, where a config has them, have these values."""

    def check(config: Any) -> None:
        others = {name: getattr(config, name) for name, value in wanted.items() if getattr(config, name, value) != value}
        if others:
            right = ", ".join(f"{name}={wanted[name]!r}" for name in others)
            raise ValueError(f"this {config.model_type} has {others}, which a pipeline can't compute: expected {right}")

    return check


_ENCODER = Family(
    blocks="encoder.layer",
    before={"embeddings": Role.HIDDEN},
    check=_refuse(is_decoder=False, add_cross_attention=False),
)

_FAMILIES: dict[str, Family] = {
    "bert": _ENCODER,
    "roberta": _ENCODER,
    "xlm-roberta": _ENCODER,
    "camembert": _ENCODER,
    "electra": Family(
        blocks="encoder.layer",
        before={"embeddings": Role.HIDDEN, "embeddings_project": Role.SAME},
        check=_ENCODER.check,
    ),
    "distilbert": Family(blocks="transformer.layer", before={"embeddings": Role.HIDDEN}, third_input="position_ids"),
    "modernbert": Family(blocks="layers", before={"embeddings": Role.HIDDEN}, third_input="position_ids"),
    "deberta-v2": Family(
        blocks="encoder.layer",
        before={"embeddings": Role.HIDDEN, "encoder.rel_embeddings": Role.ADDED, "encoder.LayerNorm": Role.SAME},
        shared="rel_embeddings",
        returns_tuple=True,
        check=_refuse(conv_kernel_size=0, z_steps=0, legacy=True),
    ),
    "gpt2": Family(
        blocks="h",
        before={"wte": Role.HIDDEN, "wpe": Role.ADDED, "drop": Role.SAME},
        third_input="position_ids",
        check=_refuse(add_cross_attention=False),
    ),
    "opt": Family(
        blocks="decoder.layers",
        before={
            "decoder.embed_tokens": Role.HIDDEN,
            "decoder.project_in": Role.SAME,
            "decoder.embed_positions": Role.ADDED,
        },
        third_input="position_ids",
        check=_refuse(layerdrop=0.0),
    ),
}


def supported_model_types() -> list[str]:
    """The `config.model_type`s that are described here; others may describe themselves."""
    return sorted(_FAMILIES)


def family_of(config: PretrainedConfig) -> Family:
    """The architecture of a config.

    Raises:
        ValueError: nobody describes it, or this config of it can't be a pipeline.

    """
    family = _FAMILIES.get(config.model_type) or _described_by_itself(config)
    if family is None:
        raise ValueError(
            f"expected a model with a base_model_pp_plan in its config, or of one of the types "
            f"{', '.join(supported_model_types())}; got {config.model_type!r}: describe it in avgpipe_ds/hf/families.py (where "
            "its list of blocks is, and which modules run before them)"
        )
    family.check(config)
    return family


def _described_by_itself(config: PretrainedConfig) -> Family | None:
    """From the plan that transformers keeps for pipelines: modules in the order in which they run."""
    names = list(getattr(config, "base_model_pp_plan", None) or ())
    if "layers" not in names or names[0] == "layers":
        return None
    embedding, *others = names[: names.index("layers")]
    before = {embedding: Role.HIDDEN} | dict.fromkeys(others, Role.SAME)
    return Family(blocks="layers", before=before, third_input="position_ids", check=_refuse(is_encoder_decoder=False))
