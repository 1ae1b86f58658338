"""The supported families, one adapter each, imported only when a model needs it."""

from __future__ import annotations

from importlib import import_module

from avgpipe_ds.hf.families.base import Family

#: `config.model_type` -> module of this package that defines the adapter as `FAMILY`.
_ADAPTERS = {"bert": "bert", "gpt2": "gpt2", "llama": "llama"}


def supported_model_types() -> list[str]:
    """The `config.model_type`s that have an adapter."""
    return sorted(_ADAPTERS)


def family_of(model_type: str) -> Family:
    """The adapter for a `config.model_type`; `ValueError` when there is none."""
    if model_type not in _ADAPTERS:
        raise ValueError(
            f"expected a model_type with a pipeline adapter ({', '.join(supported_model_types())}), got {model_type!r}: add one "
            f"(a Family that plans the layers, builds a block and derives the blocks' masks; see avgpipe_ds/hf/families/base.py)"
        )
    family: Family = import_module(f"{__name__}.{_ADAPTERS[model_type]}").FAMILY
    return family
