"""`eval_batch`: the reference model, on data of any size, for those who ask."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.distributed.models import WIDTH, Run, Task, merged, weights_of
from tests.distributed.world import World

NUM_STAGES = 3


class Twofold(nn.Module):
    """Ends a model with a tuple of different dtypes."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x.argmax(-1)


def first_loss(outputs: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    return nn.functional.mse_loss(outputs[0], labels)


@dataclass(frozen=True)
class TwofoldTask(Task):
    def layers(self) -> list[Any]:
        from deepspeed.pipe import LayerSpec

        return [*super().layers(), LayerSpec(Twofold)]

    @property
    def loss(self) -> Any:
        return first_loss


def micro_batches(sizes: list[int]) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(size, WIDTH, generator=generator), torch.randn(size, WIDTH, generator=generator)) for size in sizes]


def started(run: Run) -> tuple[Any, int, Iterator[Any]]:
    """An engine with work in flight."""
    engine, data = run.engine(), run.task.data()
    for _ in range(2):
        engine.train_batch(data)
    return engine, engine.global_rank, data


def evaluate_in_many_ways(run: Run) -> dict[str, Any]:
    engine, rank, data = started(run)
    batches = micro_batches([1, 5, 2, 7, 3])
    got: dict[str, Any] = {"z": engine.reference_state_dict()}
    got["loss"] = engine.eval_batch(iter(batches), num_micro_batches=5)
    got["loss on the last only"] = engine.eval_batch(iter(batches), num_micro_batches=5, bcast_loss=False)
    got["default count"] = engine.eval_batch(iter(batches))
    pair = engine.eval_batch(iter(batches), num_micro_batches=5, return_logits=rank == 1)
    got["asked"] = pair if rank == 1 else (pair, None)
    got["all asked"] = engine.eval_batch(iter(batches[:1]), num_micro_batches=1, return_logits=True)
    got["no loss"] = engine.eval_batch(iter(batches), num_micro_batches=2, compute_loss=False, reduce_output=None)
    got["losses"] = engine.eval_batch(iter(batches), num_micro_batches=5, reduce_output=None)
    engine.train_batch(data)
    engine.close()
    return got


@pytest.mark.timeout(120)
@pytest.mark.parametrize("task", [pytest.param(Task(), id="tensor"), pytest.param(TwofoldTask(num_layers=5), id="tuple")])
def test_all_outputs_of_the_reference(worlds: dict[int, World], task: Task) -> None:
    results = worlds[NUM_STAGES].run(evaluate_in_many_ways, Run(task=task, num_stages=NUM_STAGES, avgpipe={"num_pipelines": 2}))
    model = task.plain()
    model.load_state_dict(merged([result["z"] for result in results]))
    batches = micro_batches([1, 5, 2, 7, 3])
    with torch.no_grad():
        outputs = [reduce(lambda x, layer: layer(x), model.functions, inputs) for inputs, _ in batches]
        losses = torch.stack([task.loss(out, labels) for out, (_, labels) in zip(outputs, batches, strict=True)])

    for result in results:
        assert result["loss"].item() == pytest.approx(losses.mean().item(), rel=1e-6)
        assert result["default count"].item() == pytest.approx(losses[:4].mean().item(), rel=1e-6)
        assert result["asked"][0].item() == result["loss"].item()
        assert_close(result["all asked"][1], outputs[:1])
    assert [result["loss on the last only"] is None for result in results] == [True, True, False]
    assert [result["asked"][1] is None for result in results] == [True, False, True]
    assert_close(results[1]["asked"][1], outputs)
    assert [result["no loss"] is None for result in results] == [True, True, False]
    assert_close(results[2]["no loss"], outputs[:2])
    assert results[0]["losses"] is None and torch.stack(results[2]["losses"]).tolist() == pytest.approx(losses.tolist(), rel=1e-6)


def assert_close(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def go_wrong_and_on(run: Run) -> tuple[list[str], dict[str, Tensor]]:
    """Evaluations that fail on every rank alike, then training as if nothing had been."""
    engine, rank, data = started(run)
    good = micro_batches([2, 2, 2])

    def failing() -> Iterator[Any]:
        yield good[0]
        raise OSError("disk on fire")

    said = []
    for arguments in (
        {"data_iter": iter(good), "num_micro_batches": 4},
        {"data_iter": iter(())},
        {"data_iter": iter(good), "num_micro_batches": 2 if rank == 1 else 3},
        {"data_iter": iter(good if rank == 0 else good[:1]), "num_micro_batches": 2},
        {"data_iter": failing() if rank == 2 else iter(good), "num_micro_batches": 2},
        {"data_iter": good, "num_micro_batches": 2},
        {"data_iter": iter([(torch.zeros(3, WIDTH), torch.zeros(2, WIDTH))]), "num_micro_batches": 1},
    ):
        try:
            said.append(f"returned {engine.eval_batch(**arguments)}")
        except Exception as error:  # noqa: BLE001
            said.append(f"{type(error).__name__}: {error}")
    engine.train_batch(data)
    weights = weights_of(engine.module)
    engine.close()
    return said, weights


def go_on(run: Run) -> dict[str, Tensor]:
    engine, _, data = started(run)
    engine.train_batch(data)
    weights = weights_of(engine.module)
    engine.close()
    return weights


@pytest.mark.timeout(120)
def test_bad_evaluations_are_errors_on_every_rank_and_training_goes_on(worlds: dict[int, World]) -> None:
    run = Run(task=Task(dropout=0.2), num_stages=NUM_STAGES, avgpipe={"num_pipelines": 2})
    results = worlds[NUM_STAGES].run(go_wrong_and_on, run)
    expected = worlds[NUM_STAGES].run(go_on, run)
    for rank, ((said, weights), undisturbed) in enumerate(zip(results, expected, strict=True)):
        too_few, empty, different, uneven, broken, no_iterator, sizes = said
        assert too_few.startswith("ValueError") and "takes 4 micro-batches, the iterator gave 3" in too_few
        assert empty.startswith("ValueError") and "the iterator is empty" in empty
        assert different.startswith("ValueError") and "num_micro_batches=2" in different and "num_micro_batches=3" in different
        assert uneven.startswith("ValueError") and "the iterator gave 1" in uneven
        assert broken == ("" if rank == 2 else "RemoteError: rank 2 failed: ") + "OSError: disk on fire"
        assert "TypeError: data_iter must be an iterator, got a list: pass iter(loader)" in no_iterator
        assert sizes.startswith("ValueError") and "inputs and labels of a micro-batch differ in size: 3 samples" in sizes
        assert all(torch.equal(weights[name], value) for name, value in undisturbed.items())
