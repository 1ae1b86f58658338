"""What a `PipelineModule` says of its place in the job and of its tied layers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import PipelineModule, TiedLayerSpec

from avgpipe_ds.errors import ConfigError

__all__ = [
    "PLACEHOLDER",
    "PartitionedModule",
    "communicators_of",
    "ensure_trainable",
    "layers_of",
    "name_of",
    "place_of",
    "recomputes_activations",
    "tied_stages",
    "weights_of",
]

logger = logging.getLogger(__name__)

PLACEHOLDER = "nothing_to_train"
"""Name of the parameter that stands in where a stage has none to train."""


class PartitionedModule(PipelineModule):  # type: ignore[misc]
    """DeepSpeed's `PipelineModule`, whose stages may be given: by measured times `avgpipe-tune` proposes them.

    Args:
        partition: K + 1 layer numbers: stage k has the layers `partition[k]` to `partition[k + 1]`, that one not included. None
            leaves it to `partition_method`.
        args, kwargs: as `deepspeed.pipe.PipelineModule` takes them.

    Raises:
        ValueError: the boundaries are not those of the module's stages and layers.

    """

    def __init__(self, *args: Any, partition: Sequence[int] | None = None, **kwargs: Any) -> None:
        self._partition = None if partition is None else list(partition)
        super().__init__(*args, **kwargs)

    def _partition_layers(self, method: str = "uniform") -> None:
        if self._partition is None:
            super()._partition_layers(method=method)
            return
        parts, num_layers = self._partition, len(self._layer_specs)
        if len(parts) != self.num_stages + 1:
            raise ValueError(f"partition {parts} is of {len(parts) - 1} stages, the module has {self.num_stages}")
        if parts[0] != 0 or any(a >= b for a, b in zip(parts, parts[1:], strict=False)):
            raise ValueError(f"partition {parts} must rise from 0: every stage needs a layer")
        if parts[-1] != num_layers:
            raise ValueError(f"partition {parts} ends at layer {parts[-1]}, the module has {num_layers}")
        self.parts = parts
        stage_id = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(start=parts[stage_id], stop=parts[stage_id + 1])


def ensure_trainable(module: PipelineModule) -> torch.nn.Parameter | None:
    """Give a stage with nothing to train one unused parameter, for DeepSpeed needs an optimizer on every stage.

    It belongs to no layer, so it is neither computed with nor saved. Returned if it was needed.
    """
    if any(p.requires_grad for p in module.parameters()):
        return None
    logger.warning("stage %d has nothing to train; it only passes gradients on", module.stage_id)
    placeholder = torch.nn.Parameter(torch.zeros(1, device=get_accelerator().device_name(module.local_rank)))
    module.register_parameter(PLACEHOLDER, placeholder)
    return placeholder


def place_of(module: PipelineModule) -> tuple[int, int, list[list[int]]]:
    """This rank's stage and replica, and the global ranks by [replica][stage].

    Raises:
        ConfigError: the topology has more axes than pipe and data.

    """
    topology = module._topo
    others = [axis for axis in topology.get_axis_names() if axis not in ("pipe", "data") and topology.get_dim(axis) > 1]
    if others:
        raise ConfigError(f"the topology has the axes {others}: only pipe and data are supported")
    num_stages, num_replicas = topology.get_dim("pipe"), max(1, topology.get_dim("data"))
    mine = topology.get_coord(module.global_rank)
    ranks: list[list[int]] = [[0] * num_stages for _ in range(num_replicas)]
    for rank in range(topology.world_size()):
        where = topology.get_coord(rank)
        ranks[getattr(where, "data", 0)][where.pipe] = rank
    return mine.pipe, getattr(mine, "data", 0), ranks


def layers_of(module: PipelineModule) -> list[tuple[int, Callable[[Any], Any]]]:
    """This stage's layers in order, each with its number in the whole model."""
    return [(module._local_start + place, function) for place, function in enumerate(module.forward_funcs)]


def weights_of(function: Callable[[Any], Any]) -> list[torch.Tensor]:
    """Of a layer; a tied one is a partial of its module."""
    modules = [function, *getattr(function, "args", ())]
    return [weight for module in modules if isinstance(module, torch.nn.Module) for weight in module.parameters()]


def name_of(function: Callable[[Any], Any]) -> str:
    """The class of a layer, or the name of a function."""
    function = next((one for one in getattr(function, "args", ()) if isinstance(one, torch.nn.Module)), function)
    return str(getattr(function, "__name__", type(function).__name__))


def recomputes_activations(module: PipelineModule) -> bool:
    """Whether activations are computed again in backward instead of being kept."""
    return bool(module.activation_checkpoint_interval)


def tied_stages(module: PipelineModule) -> list[tuple[int, ...]]:
    """For each tied layer, the stages that hold a copy; the same list on every rank."""
    keys = sorted({spec.key for spec in module._layer_specs if isinstance(spec, TiedLayerSpec)})
    return [
        tuple(sorted({module.stage_owner(i) for i, spec in enumerate(module._layer_specs) if getattr(spec, "key", None) == key}))
        for key in keys
    ]


def communicators_of(module: PipelineModule) -> list[Any]:
    """The parts of a module that stand for the cluster, not for the model: replicas share them."""
    shared: list[Any] = [module._grid, module._topo, module.world_group, module._layer_specs]
    shared.extend(tied["group"] for tied in module.tied_comms.values())
    return shared
