"""Bring weights into the layers that a stage has built.

Layers are built without initialising them; then each tensor is either read from the source or, if the source has none (a
new head, or no source at all), initialised by transformers' own rules. Every layer has a random-number seed of its own, so
the values do not depend on how the layers are spread over stages.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key
from transformers.initialization import guard_torch_init_functions

from avgpipe_ds.hf.adapters import Adapters
from avgpipe_ds.hf.plan import LayerPlan, first_layer_of, module_prefix
from avgpipe_ds.hf.shell import own_names, own_shapes
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
        self,
        shell: Any,
        plan: Sequence[LayerPlan],
        source: WeightSource | None,
        *,
        adapters: Adapters | None = None,
        replace_head: bool = False,
        seed: int,
    ) -> None:
        """Find everything, read nothing yet.

        Args:
            shell: the model on the meta device, with its adapters in it.
            plan: its layers.
            source: None: all weights are new.
            adapters: in `shell`.
            replace_head: a head in the source of another shape, for other classes, makes way for a new one.
            seed: of new weights.

        """
        self._shell, self._plan, self._source, self._seed, self._adapters = shell, plan, source, seed, adapters
        self._found: dict[str, tuple[WeightSource, str]] = {}
        self.new_names: list[str] = []
        if source is not None:
            self._found = _locate(shell, source, adapters)
            self.new_names = self._check(source, replace_head)
        if adapters is not None and adapters.source is not None:
            self._found |= {name: (adapters.source, found) for name, found in adapters.located().items()}
        self.num_tensors_read = 0
        self.num_bytes_read = 0

    def _check(self, source: WeightSource, replace_head: bool) -> list[str]:
        """Compare the source with the model; return the names of the head's tensors that will be new."""
        missing: list[str] = []
        misshapen: list[str] = []
        new: list[str] = []
        for name, expected in own_shapes(self._shell).items():
            is_head = _may_be_new(self._shell, name)
            if self._adapters is not None and self._adapters.is_new(name):
                continue
            if name not in self._found:
                (new if is_head else missing).append(name)
                continue
            shape = source.shape(self._found[name][1])
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
        used = {name for source, name in self._found.values() if source is self._source}
        return [] if self._source is None else [name for name in self._source if name not in used]

    def fill(self, index: int, layer: nn.Module) -> None:
        """Give every tensor of `layer`, built from entry `index` of the plan, its value."""
        plan = self._plan[index]
        tensors = {plan.checkpoint_name(name): tensor for name, tensor in _tensors_of(layer).items()}
        loaded = {name: tensor for name, tensor in tensors.items() if name in plan.tensors and name in self._found}
        for name, tensor in loaded.items():
            self._read(*self._found[name], tensor)
        known = {id(tensor) for tensor in loaded.values()}
        if any(id(tensor) not in known for tensor in tensors.values()):
            # Copies of a tied layer on several stages must start alike, so all take the seed of the first.
            first = first_layer_of(self._plan, module_prefix(self._plan, index))
            initialise(tensors, self._shell, seed=self._seed + first, loaded=list(loaded.values()), adapters=self._adapters)

    def _read(self, source: WeightSource, name: str, target: Tensor) -> None:
        tensor = source.read(name)
        with torch.no_grad():
            target.copy_(tensor)
        self.num_tensors_read += 1
        self.num_bytes_read += tensor.numel() * tensor.element_size()


def initialise(
    tensors: Mapping[str, Tensor], shell: Any, *, seed: int, loaded: Sequence[Tensor] = (), adapters: Adapters | None = None
) -> None:
    """Initialise all tensors but those that are `loaded` by the rules of transformers' model; on the CPU.

    Rules are those of modules with all that is in them, so the tensors take their places in `shell` meanwhile, where the others
    have no storage. The global random state stays as it is.

    Args:
        tensors: parameters and buffers, by their names in `shell`.
        shell: the model on the meta device.
        seed: of the random numbers.
        loaded: those that have their values.
        adapters: in `shell`; they begin by peft's rules.

    """
    with _in_place(tensors, shell), _marked(loaded), torch.random.fork_rng(devices=[]), guard_torch_init_functions():
        # Not torch.manual_seed, which would reseed the accelerators too.
        torch.default_generator.manual_seed(seed)
        with torch.no_grad():
            # Children first, as transformers does: GPT-2 rescales projections after their own initialisation.
            shell.apply(shell._init_weights)
            if adapters is not None:
                adapters.initialise(shell)


def with_buffers(skeleton: Skeleton, shell: Any) -> Skeleton:
    """The skeleton of a base model without parameters, its buffers filled."""
    materialise(skeleton)
    buffers = _tensors_of(skeleton.model)
    initialise({f"{shell.base_model_prefix}.{name}": buffer for name, buffer in buffers.items()}, shell, seed=0)
    return skeleton


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, also those that are no part of the state dict; tied ones under each of their names."""
    return {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers(remove_duplicate=False))}


@contextmanager
def _in_place(tensors: Mapping[str, Tensor], shell: Any) -> Iterator[None]:
    """The tensors are those of the shell."""
    restore: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for name, tensor in tensors.items():
            path, _, attribute = name.rpartition(".")
            owner = shell.get_submodule(path)
            place = owner._parameters if attribute in owner._parameters else owner._buffers
            restore.append((place, attribute, place[attribute]))
            place[attribute] = tensor
        yield
    finally:
        for place, attribute, tensor in restore:
            place[attribute] = tensor


@contextmanager
def _marked(loaded: Sequence[Tensor]) -> Iterator[None]:
    """Transformers' mark: its initialisers pass over these."""
    for tensor in loaded:
        tensor._is_hf_initialized = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for tensor in loaded:
            del tensor._is_hf_initialized  # type: ignore[attr-defined]


def _may_be_new(shell: Any, name: str) -> bool:
    """Whether checkpoints may lack a tensor: those of a head, and of the pooler, which not all ways of pretraining have."""
    return not name.startswith(f"{shell.base_model_prefix}.") or ".pooler." in name


def _locate(shell: Any, source: WeightSource, adapters: Adapters | None) -> dict[str, tuple[WeightSource, str]]:
    """Name in the model -> where it is.

    Transformers' own renaming covers base models without their prefix (`embeddings.` for `bert.embeddings.`) and names of
    older versions (`LayerNorm.gamma`).
    """
    original = (lambda name: name) if adapters is None else adapters.original
    state = {original(name): tensor for name, tensor in shell.state_dict().items()}
    renamings = [rule for rule in get_model_conversion_mapping(shell) if isinstance(rule, WeightRenaming)]
    found = {rename_source_key(name, renamings, [], shell.base_model_prefix, state)[0]: name for name in source}
    for alias, name in shell.all_tied_weights_keys.items():
        # Of two tied tensors some writers keep the head's.
        if name not in found and alias in found:
            found[name] = found[alias]
    return {name: (source, found[original(name)]) for name in own_names(shell) if original(name) in found}
