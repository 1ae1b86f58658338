"""What passes between stages may be anything made of tensors, and may change from micro-batch to micro-batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.distributed.history import assert_same_history, train, whole
from tests.distributed.models import VOCABULARY, WIDTH, Embedding, Layer, Run, Task
from tests.distributed.oracle import train_by_the_formulas, train_on_one_process
from tests.distributed.world import World

SCHEDULES = [{"name": "1f1b"}, {"name": "gpipe"}, {"name": "advance_forward", "advance": 1}]


class Start(nn.Module):
    """Ids to a tuple with everything in it: with and without gradient, 0-dim, without elements, integer, bool, float16."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = Embedding()
        self.scale = nn.Parameter(torch.tensor([1.5]))  # DeepSpeed refuses 0-dim parameters

    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        ids, mask, keep = inputs
        x = self.embedding(ids)
        return x, ids, mask, keep, self.scale[0], x[:0], x.new_empty(0, 3, dtype=torch.float16), ids.sum()


class Middle(nn.Module):
    """Uses all of them and passes them on, some changed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.layer = Layer(seed)

    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, ids, mask, keep, scale, empty, nothing, total = inputs
        assert not mask.requires_grad and not keep.requires_grad and x.requires_grad and scale.requires_grad
        assert (ids.dtype, keep.dtype, nothing.dtype) == (torch.int64, torch.bool, torch.float16)
        assert total.shape == scale.shape == () and int(total) == int(ids.sum())
        x = torch.where(keep[..., None], self.layer(x) * mask[..., None] * scale, x + empty.sum())
        return x, ids, mask, keep, scale + x.mean(), empty * 2, nothing, total


def finish(inputs: tuple[Tensor, ...]) -> Tensor:
    """One vector per sample, whatever the length."""
    x, _, mask, _, scale, empty, _, _ = inputs
    return (x * mask[..., None]).mean(1) * scale + empty.sum()


@dataclass(frozen=True)
class Anything(Task):
    """Sequences of another length and another number in every micro-batch; one of them without samples."""

    def layers(self) -> list[Any]:
        from deepspeed.pipe import LayerSpec

        return [LayerSpec(Start), LayerSpec(Middle, 0), LayerSpec(Middle, 1), LayerSpec(Middle, 2), LayerSpec(Middle, 3), finish]

    @property
    def loss(self) -> Any:
        return sum_of_squares

    def data(self, seed: int = 1) -> Iterator[tuple[Any, Any]]:
        generator = torch.Generator().manual_seed(seed)
        sizes = [(3, 5), (1, 2), (4, 7), (0, 3), (2, 1), (3, 5), (5, 4)]
        while True:
            for size, length in sizes:
                ids = torch.randint(VOCABULARY, (size, length), generator=generator)
                mask = torch.rand(size, length, generator=generator)
                keep = torch.rand(size, length, generator=generator) > 0.3
                yield (ids, mask, keep), torch.randn(size, WIDTH, generator=generator)


def sum_of_squares(outputs: Tensor, labels: Tensor) -> Tensor:
    """Defined for a micro-batch without samples, too."""
    return (outputs - labels).square().sum() / WIDTH


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule["name"])
@pytest.mark.parametrize("num_pipelines", [1, 2])
@pytest.mark.parametrize("num_stages", [2, 3])
def test_tuples_of_anything_in_changing_shapes(
    worlds: dict[int, World], num_stages: int, num_pipelines: int, schedule: dict[str, Any]
) -> None:
    avgpipe = {"num_pipelines": num_pipelines, "schedule": schedule}
    run = Run(task=Anything(), num_stages=num_stages, num_micro_batches=5, clipping=0.5, avgpipe=avgpipe)
    expected = train_on_one_process(run) if num_pipelines == 1 else train_by_the_formulas(run)
    assert_same_history(whole(worlds[num_stages].run(train, run)), expected)


@pytest.mark.parametrize("interval", [1, 2])
def test_tuples_of_anything_with_activation_checkpointing(worlds: dict[int, World], interval: int) -> None:
    options = {"activation_checkpoint_interval": interval}
    run = Run(task=Anything(), num_stages=3, num_micro_batches=5, module_options=options)
    assert_same_history(whole(worlds[3].run(train, run)), train_on_one_process(run))


@dataclass(frozen=True)
class InPlace(Task):
    """Every stage of two starts with a layer that works in place."""

    def layers(self) -> list[Any]:
        from deepspeed.pipe import LayerSpec

        return [nn.ReLU(inplace=True), LayerSpec(Layer, 0), nn.ReLU(inplace=True), LayerSpec(Layer, 1)]


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    """Two views of one tensor."""
    return x[:, : WIDTH // 2], x[:, WIDTH // 2 :]


def join(halves: tuple[Tensor, Tensor]) -> Tensor:
    return torch.cat(halves[::-1], dim=1)


def transposed(x: Tensor) -> Tensor:
    """Not contiguous; of shape [WIDTH, samples]."""
    return x.T


@dataclass(frozen=True)
class Views(Task):
    """Stages pass on views that share memory, or are not contiguous."""

    def layers(self) -> list[Any]:
        from deepspeed.pipe import LayerSpec

        return [LayerSpec(Layer, 0), split, join, LayerSpec(Layer, 1), transposed, transposed]


def twice(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, x


def difference(pair: tuple[Tensor, Tensor]) -> Tensor:
    return 2 * pair[0] - 0.5 * pair[1]


@dataclass(frozen=True)
class Repeated(Task):
    """A stage passes on one tensor twice."""

    def layers(self) -> list[Any]:
        from deepspeed.pipe import LayerSpec

        return [LayerSpec(Layer, 0), twice, difference, LayerSpec(Layer, 1)]


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("task", [InPlace(), Views(), Repeated()], ids=lambda task: type(task).__name__)
def test_memory_that_layers_share_or_overwrite(worlds: dict[int, World], task: Task, num_stages: int) -> None:
    run = Run(task=task, num_stages=num_stages, clipping=0.5)
    assert_same_history(whole(worlds[num_stages].run(train, run)), train_on_one_process(run))
