"""The data of an iteration, dealt out to the pipelines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from avgpipe_ds.data_feed import DataFeed, prepare_micro_batch
from avgpipe_ds.tracing.recorder import Recorder

CPU = torch.device("cpu")


def feed(size: int = 4) -> DataFeed:
    return DataFeed(size, lambda item: (item, None), Recorder())


def trained(source: DataFeed, iteration: int, size: int = 4, *, last_first: bool = False) -> list[Any]:
    """Take a whole iteration as the pipelines would, and finish it as `train_batch` does."""
    assert source.count(iteration) == size
    order = reversed(range(size)) if last_first else range(size)
    items = {index: source.take(iteration, index)[0] for index in order}
    source.finish(iteration)
    source.ready(iteration + 1)
    return [items[index] for index in range(size)]


def test_every_item_once_in_order_whoever_asks_first() -> None:
    source = feed()
    source.use(iter(range(12)))
    assert [trained(source, t, last_first=t == 1) for t in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert source.count(3) == 0


def test_an_item_is_given_once() -> None:
    source = feed()
    source.use(iter(range(4)))
    source.count(0)
    source.take(0, 2)
    with pytest.raises(AssertionError, match="taken twice"):
        source.take(0, 2)


def test_takes_one_iteration_ahead_and_no_more() -> None:
    taken: list[int] = []

    def counted() -> Iterator[int]:
        for number in range(100):
            taken.append(number)
            yield number

    source = feed()
    source.use(counted())
    trained(source, 0)
    assert len(taken) == 8
    trained(source, 1)
    assert len(taken) == 12


def test_a_new_iterator_takes_over_after_what_was_taken() -> None:
    source = feed()
    source.use(iter(range(100)))
    trained(source, 0)
    source.use(iter(range(100, 200)))
    assert trained(source, 1) == [4, 5, 6, 7]
    assert trained(source, 2) == [100, 101, 102, 103]


def test_a_new_iterator_completes_what_the_old_one_began() -> None:
    source = feed()
    source.use(iter(range(6)))
    trained(source, 0)
    assert source.count(1) == 2
    source.use(iter(range(100, 200)))
    assert trained(source, 1) == [4, 5, 100, 101]


def test_an_exhausted_iterator_is_asked_again_only_when_it_is_passed_again() -> None:
    refilled: list[int] = [0, 1]
    asked = 0

    class Refillable:
        def __iter__(self) -> Refillable:
            return self

        def __next__(self) -> int:
            nonlocal asked
            asked += 1
            if not refilled:
                raise StopIteration
            return refilled.pop(0)

    source, iterator = feed(), Refillable()
    source.use(iterator)
    assert source.count(0) == 2 and not source.ready(0) and asked == 3
    refilled.extend([2, 3])
    source.use(iterator)
    assert trained(source, 0) == [0, 1, 2, 3]


def test_an_error_waits_for_its_own_iteration() -> None:
    def failing() -> Iterator[int]:
        yield from range(6)
        raise OSError("disk on fire")

    source = feed()
    source.use(failing())
    assert trained(source, 0) == [0, 1, 2, 3]  # the error was met while taking ahead
    assert not source.ready(1)
    with pytest.raises(OSError, match="disk on fire"):
        source.count(1)
    assert source.count(1) == 2  # a generator that raised has ended; what it gave is kept
    source.use(iter([6, 7]))
    assert trained(source, 1) == [4, 5, 6, 7]


def test_reset_gives_up_what_was_taken() -> None:
    source = feed()
    source.use(iter(range(100)))
    trained(source, 0)
    source.reset()
    assert source.count(5) == 0
    source.use(iter(range(50, 60)))
    assert trained(source, 5) == [50, 51, 52, 53]


def test_each_stage_gets_its_part() -> None:
    item = (torch.ones(2, 3), [torch.zeros(2), torch.ones(2)])
    first = prepare_micro_batch(item, CPU, first_stage=True, last_stage=False)
    last = prepare_micro_batch(item, CPU, first_stage=False, last_stage=True)
    assert isinstance(first[0], torch.Tensor) and first[1] is None
    assert last[0] is None and isinstance(last[1], tuple) and len(last[1]) == 2


def test_inputs_are_copied() -> None:
    buffer = torch.zeros(2)
    inputs, _ = prepare_micro_batch((buffer, None), CPU, first_stage=True, last_stage=False)
    buffer.fill_(1)
    assert inputs.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("item", "text"),
    [
        (torch.zeros(2), r"pairs \(inputs, labels\) of a micro-batch, got a Tensor"),
        ((torch.zeros(2),), "got a tuple of length 1"),
        ({"inputs": 1}, "got a dict"),
        ((torch.zeros(2), "label"), "the labels of a micro-batch must be a tensor or a tuple of tensors, got str"),
        ((torch.zeros(2), (torch.zeros(2), 3)), "the labels .* got tuple"),
        (([1, 2], torch.zeros(2)), "the inputs of a micro-batch must be a tensor or a tuple of tensors, got list"),
        ((torch.zeros(3, 2), torch.zeros(4)), r"3 samples in the inputs \(3, 2\), 4 in the labels \(4,\)"),
    ],
)
def test_bad_items(item: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        prepare_micro_batch(item, CPU, first_stage=True, last_stage=True)
