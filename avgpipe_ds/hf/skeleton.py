"""Transformers' own model with only some of its modules in it.

A stage needs three things of a model beside its blocks: what comes before them (embeddings), what they are called with (masks,
rotary tables), and what comes after them (norm, head). Each is the whole model's own `forward`, run on a copy in which the
modules that are not wanted give way to stand-ins without parameters: the blocks hand on what they get and note it down; the
embeddings return what is given. So nothing of transformers' code is repeated here, and what it does for a new architecture,
such as another mask for every second block, is done here, too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from avgpipe_ds.hf.families import Family, Role

__all__ = ["Calls", "Skeleton", "materialise", "only_after", "only_before", "only_calls"]


@dataclass(slots=True)
class Calls:
    """How transformers calls each block, beside the hidden states: positional and keyword arguments."""

    arguments: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)


@dataclass(slots=True)
class _Given:
    """What the stand-ins of one skeleton share during a forward."""

    embedded: Tensor | None = None
    hidden: Tensor | None = None
    first: Tensor | None = None
    calls: Calls = field(default_factory=Calls)


class _Block(nn.Module):
    """In place of a block."""

    def __init__(self, block: nn.Module, given: _Given, *, returns_tuple: bool) -> None:
        super().__init__()
        # Models ask their blocks which attention they have.
        for name, value in vars(block).items():
            if not name.startswith("_") and isinstance(value, (str, int, float, bool)):
                setattr(self, name, value)
        self._given, self._returns_tuple = given, returns_tuple

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Note down what comes, and hand on the hidden states: those that are given, if some are."""
        given = self._given
        given.first = hidden_states if given.first is None else given.first
        given.calls.arguments.append((args, kwargs))
        hidden_states = hidden_states if given.hidden is None else given.hidden
        return (hidden_states, None) if self._returns_tuple else hidden_states


class _Embedding(nn.Module):
    """In place of what makes the hidden states."""

    def __init__(self, given: _Given) -> None:
        super().__init__()
        self._given = given

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """What is given, whatever it is asked for."""
        assert self._given.embedded is not None
        return self._given.embedded


class _Zero(nn.Module):
    """In place of what is added to the hidden states."""

    weight = torch.zeros(())

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Zero."""
        return self.weight


class _Same(nn.Module):
    """In place of what changes the hidden states."""

    def forward(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        """What came."""
        return value


class _Later(nn.Module):
    """In place of what comes after the blocks, where that is not wanted."""

    def __init__(self, path: str, given: _Given) -> None:
        super().__init__()
        self._path, self._given = path, given

    def forward(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        """What came.

        Raises:
            RuntimeError: it does not come after the blocks.

        """
        if self._given.first is None:
            raise RuntimeError(
                f"{self._path!r} runs before the blocks: enter it in what avgpipe_ds/hf/families.py knows of the model"
            )
        return value


class Skeleton(nn.Module):
    """A model with stand-ins in it. Its tensors have transformers' names, after `model.`."""

    def __init__(self, model: nn.Module, given: _Given) -> None:
        super().__init__()
        self.model = model
        self._given = given

    def run(self, *, embedded: Tensor, hidden: Tensor | None = None, **inputs: Any) -> tuple[Any, Tensor, Calls]:
        """Run `model(**inputs)`.

        Args:
            embedded: what the embedding returns, `[batch, length, ...]`.
            hidden: what the last block returns; None: what comes to the first one.
            inputs: as transformers takes them.

        Returns:
            The model's output, the hidden states that come to the first block, and how all blocks are called.

        """
        with self._giving(embedded, hidden) as given:
            output = self.model(**inputs)
            assert given.first is not None
            return output, given.first, given.calls

    @contextmanager
    def _giving(self, embedded: Tensor, hidden: Tensor | None) -> Iterator[_Given]:
        given = self._given
        given.embedded, given.hidden, given.first, given.calls = embedded, hidden, None, Calls()
        try:
            yield given
        finally:
            # Graphs must not outlive their micro-batch.
            given.embedded, given.hidden, given.first, given.calls = None, None, None, Calls()


def only_before(model: Any, family: Family) -> Skeleton:
    """The base model with what runs before its blocks, but for the word embedding itself. On the meta device, as `model` is."""
    base, given = model.base_model, _Given()
    return _skeleton(
        base, _blocks(base, family, given) | _later(base, family, given) | {id(_words(model)): _Embedding(given)}, given
    )


def only_calls(model: Any, family: Family) -> Skeleton:
    """The base model without any parameters: it only finds out how blocks are called. In evaluation mode: nothing is random."""
    base, given = model.base_model, _Given()
    skeleton = _skeleton(
        base, _blocks(base, family, given) | _later(base, family, given) | _before(base, family, given), given
    ).eval()
    assert not list(skeleton.parameters()), [name for name, _ in skeleton.named_parameters()]
    return skeleton


def only_after(model: Any, family: Family, tied: Iterable[str]) -> Skeleton:
    """The model with what runs after its blocks. The weights with the names in `tied` are taken out: they are given."""
    base, given = model.base_model, _Given()
    skeleton = _skeleton(model, _blocks(base, family, given) | _before(base, family, given), given)
    for name in tied:
        path, _, attribute = name.rpartition(".")
        owner = skeleton.model.get_submodule(path)
        del owner._parameters[attribute]
        owner.__dict__[attribute] = None  # a plain attribute, set for each micro-batch
    return skeleton


def _skeleton(model: nn.Module, stand_ins: dict[int, Any], given: _Given) -> Skeleton:
    """A copy that has the stand-ins in place of the modules with these ids."""
    copied = copy.deepcopy(model, dict(stand_ins))
    config: Any = copied.config
    config.use_cache = False
    return Skeleton(copied, given)


def _words(model: Any) -> nn.Module:
    words: nn.Module = model.get_input_embeddings()
    return words


def _blocks(base: nn.Module, family: Family, given: _Given) -> dict[int, Any]:
    blocks = base.get_submodule(family.blocks)
    assert isinstance(blocks, nn.ModuleList)
    return {id(blocks): nn.ModuleList(_Block(block, given, returns_tuple=family.returns_tuple) for block in blocks)}


def _before(base: nn.Module, family: Family, given: _Given) -> dict[int, Any]:
    makers: dict[Role, Callable[[], nn.Module]] = {Role.HIDDEN: lambda: _Embedding(given), Role.ADDED: _Zero, Role.SAME: _Same}
    modules = dict(base.named_modules())
    return {id(modules[path]): makers[role]() for path, role in family.before.items() if path in modules}


def _later(base: nn.Module, family: Family, given: _Given) -> dict[int, Any]:
    """Stand-ins for all with parameters that runs neither before the blocks nor in them."""
    kept = {family.blocks, *family.before}
    above = {path.rsplit(".", depth)[0] for path in kept for depth in range(1, path.count(".") + 1)}
    found: dict[int, Any] = {}

    def visit(module: nn.Module, prefix: str) -> None:
        for name, child in module.named_children():
            path = prefix + name
            if path in above:
                visit(child, f"{path}.")
            elif path not in kept and any(True for _ in child.parameters()):
                found[id(child)] = _Later(path, given)

    visit(base, "")
    return found


def materialise(module: nn.Module, device: str = "cpu") -> None:
    """Give the tensors of a module on the meta device storage, uninitialised. What was one tensor stays one."""
    made: dict[Tensor, Tensor] = {}  # by identity: the keys keep the old ones alive

    def storage(tensor: Tensor) -> Tensor:
        if tensor not in made:
            empty = torch.empty_like(tensor, device=device)
            made[tensor] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
        return made[tensor]

    for owner in module.modules():
        for tensors in (owner._parameters, owner._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor.is_meta:
                    tensors[name] = storage(tensor)  # type: ignore[assignment]
