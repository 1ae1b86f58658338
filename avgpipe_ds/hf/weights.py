"""Bring weights into the layers that a stage has built.

Layers are built without initialising them; then each tensor is either read from the source or, if the source has none (a
new head, or no source at all), initialised by transformers' own rules. Every layer has a random-number seed of its own, so
the values do not depend on how the layers are spread over stages.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key
from transformers.initialization import guard_torch_init_functions

from avgpipe_ds.hf.plan import LayerPlan, first_layer_of, module_prefix
from avgpipe_ds.hf.shell import own_shapes
from avgpipe_ds.hf.skeleton import Skeleton, materialise
from avgpipe_ds.hf.sources import WeightSource

logger = logging.getLogger(__name__)


class WeightLoader:
    """Fills layers from `source`, or from `seed` where the source has nothing.

    Raises:
        ValueError: the source lacks weights that are no head's, or has them in another shape. Every rank finds the same
            faults, because each checks the whole model by its names and shapes, not only its own stage.

    """

    def __init__(
        self, shell: Any, plan: Sequence[LayerPlan], source: WeightSource | None, *, replace_head: bool = False, seed: int
    ) -> None:
        """`replace_head`: a head in the source of another shape, for other classes, makes way for a new one."""
        self._shell, self._plan, self._source, self._seed = shell, plan, source, seed
        self._found: dict[str, str] = {} if source is None else _locate(shell, source)
        self.new_names: list[str] = [] if source is None else self._check(source, replace_head)
        self.num_tensors_read = 0
        self.num_bytes_read = 0

    def _check(self, source: WeightSource, replace_head: bool) -> list[str]:
        """Compare the source with the model; return the names of the head's tensors that will be new."""
        missing: list[str] = []
        misshapen: list[str] = []
        new: list[str] = []
        for name, expected in own_shapes(self._shell).items():
            is_head = _may_be_new(self._shell, name)
            if name not in self._found:
                (new if is_head else missing).append(name)
                continue
            shape = source.shape(self._found[name])
            if shape != tuple(expected) and is_head and replace_head:
                del self._found[name]
                new.append(name)
            elif shape != tuple(expected):
                misshapen.append(f"{name}: {list(shape)} instead of {list(expected)}")
        if missing:
            raise ValueError(
                f"the weights of {type(self._shell).__name__} lack {len(missing)} tensors that are no new head's: {missing[:8]}; "
                f"is this a checkpoint of a {self._shell.config.model_type} model?"
            )
        if misshapen:
            raise ValueError(
                f"the weights do not fit the config: {'; '.join(misshapen[:8])}. "
                f"For other classes than the checkpoint's, pass num_labels"
            )
        return new

    def unused_names(self) -> list[str]:
        """Names in the source that no layer takes."""
        used = set(self._found.values())
        return [] if self._source is None else [name for name in self._source if name not in used]

    def fill(self, index: int, layer: nn.Module) -> None:
        """Give every tensor of `layer`, built from entry `index` of the plan, its value."""
        plan = self._plan[index]
        # What is tied within the layer is there under two names.
        tensors = {name: t for name, t in layer.state_dict(keep_vars=True).items() if plan.checkpoint_name(name) in plan.tensors}
        names = {name: self._found.get(plan.checkpoint_name(name)) for name in tensors}
        for name, found in names.items():
            if found is not None:
                self._read(found, tensors[name])
        if None in names.values() or any(True for _ in layer.buffers()):
            loaded = [tensors[name] for name, found in names.items() if found is not None]
            # Copies of a tied layer on several stages must start alike, so all take the seed of the first.
            first = first_layer_of(self._plan, module_prefix(self._plan, index))
            initialise(layer, self._shell, seed=self._seed + first, loaded=loaded)

    def _read(self, name: str, target: Tensor) -> None:
        assert self._source is not None
        tensor = self._source.read(name)
        with torch.no_grad():
            target.copy_(tensor)
        self.num_tensors_read += 1
        self.num_bytes_read += tensor.numel() * tensor.element_size()


def initialise(layer: nn.Module, shell: Any, *, seed: int, loaded: Sequence[Tensor] = ()) -> None:
    """Initialise all tensors of a layer but those that are `loaded`, buffers too, by the rules of transformers' model.

    On the CPU, and the global random state stays as it is.
    """
    for tensor in loaded:
        tensor._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers' mark: initialisers pass over it
    try:
        with torch.random.fork_rng(devices=[]), guard_torch_init_functions(), torch.no_grad():
            # Not torch.manual_seed, which would reseed the accelerators too.
            torch.default_generator.manual_seed(seed)
            # Children first, as transformers does: GPT-2 rescales projections after their own initialisation.
            layer.apply(shell._init_weights)
    finally:
        for tensor in loaded:
            del tensor._is_hf_initialized  # type: ignore[attr-defined]


def with_buffers(skeleton: Skeleton, shell: Any) -> Skeleton:
    """The skeleton without parameters, its buffers filled."""
    materialise(skeleton)
    initialise(skeleton, shell, seed=0)
    return skeleton


def _may_be_new(shell: Any, name: str) -> bool:
    """Whether checkpoints may lack a tensor: those of a head, and of the pooler, which not all ways of pretraining have."""
    return not name.startswith(f"{shell.base_model_prefix}.") or ".pooler." in name


def _locate(shell: Any, source: WeightSource) -> dict[str, str]:
    """Name in the model -> name in the source.

    Transformers' own renaming covers base models without their prefix (`embeddings.` for `bert.embeddings.`) and names of
    older versions (`LayerNorm.gamma`).
    """
    state = shell.state_dict()
    renamings = [rule for rule in get_model_conversion_mapping(shell) if isinstance(rule, WeightRenaming)]
    found = {rename_source_key(name, renamings, [], shell.base_model_prefix, state)[0]: name for name in source}
    for alias, name in shell.all_tied_weights_keys.items():
        # Of two tied tensors some writers keep the head's.
        if name not in found and alias in found:
            found[name] = found[alias]
    own = own_shapes(shell)
    return {name: located for name, located in found.items() if name in own}
