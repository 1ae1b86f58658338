"""Whose parameters an optimizer trains: those of its own pipeline's model, or the training is silently wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from avgpipe_ds.errors import ConfigError

__all__ = ["own_optimizer", "parameter_list", "with_placeholder"]


def parameter_list(parameters: Iterable[Any]) -> list[Any]:
    """Parameters, or groups of them, as lists: iterators can be neither copied nor looked at twice.

    Raises:
        ConfigError: something is neither a parameter nor a group.

    """
    listed: list[Any] = []
    for item in parameters:
        if isinstance(item, Mapping) and "params" in item:
            own = item["params"]
            listed.append({**item, "params": [own] if isinstance(own, Tensor) else list(own)})
        elif isinstance(item, Tensor | tuple):
            listed.append(item)
        else:
            raise ConfigError(f'model_parameters must hold parameters or groups {{"params": [...]}}, got {item!r:.80}')
    return listed


def with_placeholder(parameters: list[Any], placeholder: torch.nn.Parameter) -> list[Any]:
    """What `parameter_list` returned of a stage with nothing to train, with the parameter that stands in."""
    if not parameters or not isinstance(parameters[0], Mapping):
        return [*parameters, placeholder]
    first, *others = parameters
    return [{**first, "params": [*first["params"], placeholder]}, *others]


def own_optimizer(optimizer: Any, model: torch.nn.Module, parameters: list[Any] | None) -> Any:
    """The optimizer, if it trains parameters of `model` only; a callable that makes one as one that checks what it made.

    Raises:
        ConfigError: some of its parameters, or of `parameters`, belong to another model, or it is no optimizer.

    """
    if parameters is not None:
        _check("model_parameters", parameters, model)
    if isinstance(optimizer, torch.optim.Optimizer):
        _check("the optimizer", optimizer.param_groups, model)
        return optimizer
    if optimizer is None:
        return None
    if not isinstance(optimizer, Callable):  # type: ignore[arg-type]
        raise ConfigError(f"optimizer must be a torch optimizer or a callable that makes one, got {optimizer!r}")

    def make(given: Any) -> torch.optim.Optimizer:
        made = optimizer(given)
        if not isinstance(made, torch.optim.Optimizer):
            raise ConfigError(f"the callable passed as optimizer must return a torch optimizer, it returned {made!r}")
        _check("the optimizer", made.param_groups, model)
        return made

    return make


def _check(holder: str, items: Iterable[Any], model: torch.nn.Module) -> None:
    own = {id(p) for p in model.parameters()}
    groups = [item["params"] if isinstance(item, Mapping) else [item] for item in items]
    flat = [p[1] if isinstance(p, tuple) else p for group in groups for p in group]  # torch takes named ones, too
    foreign = sum(id(p) not in own for p in flat)
    if foreign:
        raise ConfigError(
            f"{foreign} of the {len(flat)} parameters of {holder} belong to another model than this pipeline's stage: make it "
            "from the parameters() of the PipelineModule that you pass, or pass a callable that uses the parameters it is given"
        )
