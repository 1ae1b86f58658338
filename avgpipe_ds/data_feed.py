"""The data of one iteration, dealt out to N pipelines.

Pipeline i of an iteration gets the i-th run of M micro-batches of what the iterator gives, whichever pipeline asks first, so
results do not depend on timing. Data is taken in whole iterations, at most one ahead of the one that trains: after
`train_batch(t)` both the first and the last stage have taken exactly the data of iterations 0..t+1, however far each of them
had run ahead, so a new iterator takes over at the same sample on both. The end of the data ends the running ahead, not the
training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from avgpipe_ds.execution.tensors import map_tensors
from avgpipe_ds.tracing.recorder import Recorder
from avgpipe_ds.tracing.spans import TAKE_DATA

__all__ = ["DataFeed", "MicroBatch", "prepare_micro_batch"]

MicroBatch = tuple[Any, Any]
"""(inputs, labels): each a tensor or a tuple of tensors."""


class DataFeed:
    """Deals out micro-batches; used by the first and the last stage.

    Args:
        micro_batches_per_iteration: N * M.
        prepare: checks and moves one item of the iterator.
        recorder: told how long the data took.

    """

    def __init__(self, micro_batches_per_iteration: int, prepare: Callable[[Any], MicroBatch], recorder: Recorder) -> None:
        self._size = micro_batches_per_iteration
        self.prepare = prepare
        self._recorder = recorder
        self._iterator: Iterator[Any] | None = None
        self._error: Exception | None = None
        # What is taken stays until its iteration is finished: a profile may want to train the same again (`hold`).
        self._items: dict[int, list[MicroBatch]] = {}
        self._taken: set[tuple[int, int]] = set()
        self._held: list[MicroBatch] | None = None
        self._exhausted = True

    def use(self, iterator: Iterator[Any]) -> None:
        """Take from this iterator from now on; what was already taken from the one before is trained first."""
        if iterator is not self._iterator or self._exhausted:
            self._iterator, self._exhausted = iterator, False

    def count(self, iteration: int) -> int:
        """Take until iteration `iteration` is complete or the data ends; returns how many micro-batches it has, N * M at most.

        Raises:
            Exception: what the iterator or the check of an item raised, also if that was while taking ahead.

        """
        self._fill(iteration)
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return len(self._items.get(iteration, ()))

    def ready(self, iteration: int) -> bool:
        """Whether all data of an iteration is there; takes it if it can. An error waits for its own iteration (`count`)."""
        self._fill(iteration)
        return len(self._items.get(iteration, ())) == self._size

    def take(self, iteration: int, index: int) -> MicroBatch:
        """Micro-batch `index` (0 .. N*M-1) of an iteration that is `ready`, once."""
        assert (iteration, index) not in self._taken, f"micro-batch {index} of iteration {iteration} was taken twice"
        self._taken.add((iteration, index))
        return self._items[iteration][index]

    def finish(self, iteration: int) -> None:
        """Iteration `iteration` is trained; forget it."""
        self._items.pop(iteration, None)
        self._taken = {(other, index) for other, index in self._taken if other != iteration}

    def hold(self, iteration: int) -> None:
        """Give the data of this iteration, if all of it is there, to those that follow, too, until `let_go`."""
        if self.ready(iteration):
            self._held = self._items[iteration]

    def let_go(self) -> list[MicroBatch]:
        """End `hold`; returns what it held."""
        held, self._held = self._held or [], None
        return held

    def give_back(self, iteration: int, items: list[MicroBatch]) -> None:
        """Data that was taken is that of this iteration again; nothing else is there."""
        if items:
            self._items = {iteration: items}

    def inherit(self, other: DataFeed, iteration: int) -> None:
        """Go on with the data that another feed has taken ahead, none of which was trained, as that of `iteration`."""
        assert len(other._items) <= 1 and not other._taken, "data of it was trained"
        self._items = {iteration: next(iter(other._items.values()), [])}
        self._iterator, self._exhausted, self._error = other._iterator, other._exhausted, other._error

    def reset(self) -> None:
        """Forget everything that was taken ahead: a checkpoint was loaded."""
        self._items.clear()
        self._taken.clear()
        self._iterator, self._error, self._exhausted = None, None, True

    def _fill(self, iteration: int) -> None:
        if self._held is not None:
            self._items[iteration] = self._held
            return
        items = self._items.setdefault(iteration, [])
        try:
            while len(items) < self._size and not self._exhausted and self._iterator is not None and self._error is None:
                with self._recorder.span(TAKE_DATA, iteration=iteration):
                    items.append(self.prepare(next(self._iterator)))
        except StopIteration:
            self._exhausted = True
        except Exception as error:  # noqa: BLE001 - must not spoil the iteration that still trains
            self._error = error


def prepare_micro_batch(item: Any, device: torch.device, *, first_stage: bool, last_stage: bool) -> MicroBatch:
    """Check one item of a user's iterator and move what this stage needs of it to `device`.

    Both are copied, since a loader may reuse its buffers while micro-batches that were taken ahead still wait.

    Raises:
        ValueError: the item is no pair, holds something other than tensors, or inputs and labels differ in size.

    """
    if not isinstance(item, tuple | list) or len(item) != 2:
        size = f" of length {len(item)}" if isinstance(item, tuple | list) else ""
        raise ValueError(
            f"the data iterator must give pairs (inputs, labels) of a micro-batch, got a {type(item).__name__}{size}"
        )
    inputs, labels = (_as_tensors(part, name) for part, name in zip(item, ("inputs", "labels"), strict=True))
    if inputs is None:
        raise ValueError("the inputs of a micro-batch must be a tensor or a tuple of tensors, got None")
    first_input, first_label = _first(inputs), _first(labels)
    if (
        first_input is not None
        and first_label is not None
        and first_input.dim()
        and first_label.dim()
        and len(first_input) != len(first_label)
    ):
        raise ValueError(
            f"inputs and labels of a micro-batch differ in size: {len(first_input)} samples in the inputs "
            f"{tuple(first_input.shape)}, {len(first_label)} in the labels {tuple(first_label.shape)}"
        )
    return (
        map_tensors(lambda t: t.detach().to(device, copy=True), inputs) if first_stage else None,
        map_tensors(lambda t: t.detach().to(device, copy=True), labels) if last_stage else None,
    )


def _as_tensors(part: Any, name: str) -> Tensor | tuple[Tensor, ...] | None:
    if part is None or isinstance(part, Tensor):
        return part
    if isinstance(part, tuple | list) and all(isinstance(t, Tensor) for t in part):
        return tuple(part)
    raise ValueError(f"the {name} of a micro-batch must be a tensor or a tuple of tensors, got {type(part).__name__}")


def _first(part: Tensor | tuple[Tensor, ...] | None) -> Tensor | None:
    return part if part is None or isinstance(part, Tensor) else next(iter(part), None)
