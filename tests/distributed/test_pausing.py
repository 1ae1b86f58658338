"""Between two calls the work in flight is merely paused: nothing that users do there changes what is trained."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed import shaky
from tests.distributed.models import Run, Task, weights_of
from tests.distributed.world import World

N, M = 2, 4
PER_ITERATION = N * M
BLOCK = {"num_pipelines": N}

SEEN: list[int] = []
"""Numbers of the micro-batches whose loss was computed on this rank, in that order."""


def recording_loss(outputs: Tensor, labels: tuple[Tensor, Tensor]) -> Tensor:
    target, number = labels
    if torch.is_grad_enabled():
        SEEN.append(int(number[0]))
    return torch.nn.functional.mse_loss(outputs.float(), target)


class NumberedTask(shaky.ShakyTask):
    """Micro-batches that know their number."""

    @property
    def loss(self) -> Any:
        return recording_loss

    def data(self, seed: int = 1) -> Iterator[tuple[Tensor, tuple[Tensor, Tensor]]]:
        for number, (inputs, labels) in enumerate(super().data(seed)):
            yield inputs, (labels, torch.full((len(inputs),), number))

    def numbered(self, start: int, stop: int) -> Iterator[tuple[Tensor, tuple[Tensor, Tensor]]]:
        """Micro-batches `start` .. `stop - 1` of `data`."""
        return itertools.islice(self.data(), start, stop)


def everything(engine: Any) -> dict[str, Tensor]:
    """All weights and buffers of this rank: the reference's and those of every pipeline."""
    state = {f"z.{name}": value for name, value in engine.reference_state_dict().items()}
    for pipeline in engine.pipelines:
        state |= {f"{pipeline.pipeline_id}.{name}": value for name, value in weights_of(pipeline.module).items()}
        starts = enumerate(pipeline.start_of_iteration[1])
        state |= {f"{pipeline.pipeline_id}.start of buffer {place}": value for place, value in starts}
    return state


def finished(engine: Any) -> dict[str, Tensor]:
    """`everything`, without the running-ahead buffers, which depend on how far a pipeline has run ahead."""
    state = everything(engine)
    return {name: value for name, value in state.items() if name[0] == "z" or "running" not in name and "tracked" not in name}


def in_flight(engine: Any) -> int:
    return sum(len(pipeline._slots) for pipeline in engine.pipelines)


def train(run: Run, iterations: int, directory: str | None) -> tuple[dict[str, Tensor], list[float], int, list[int]]:
    """Train, with disturbances after every iteration if there is a directory."""
    engine = run.engine()
    data = run.task.data()
    losses, most_in_flight = [], 0
    SEEN.clear()
    for iteration in range(iterations):
        losses.append(float(engine.train_batch(data)))
        most_in_flight = max(most_in_flight, in_flight(engine))
        if directory is None:
            continue
        before = everything(engine)
        flying = in_flight(engine)
        torch.rand(3)  # a user may draw numbers, too
        engine.eval_batch(run.task.data(seed=9), num_micro_batches=1 + iteration, return_logits=iteration == 1)
        engine.save_checkpoint(directory)
        engine.reference_state_dict()
        after = everything(engine)
        assert all(torch.equal(after[name], value) for name, value in before.items())
        assert in_flight(engine) == flying
        assert engine.module.training
    state = finished(engine)
    engine.close()
    return state, losses, most_in_flight, list(SEEN)


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("num_stages", "config", "interval"),
    [
        pytest.param(2, {}, 1, id="K2-checkpointed-activations"),
        pytest.param(3, {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}}, 0, id="K3-zero1-bf16"),
    ],
)
def test_evaluating_and_saving_change_no_bit(
    worlds: dict[int, World], tmp_path: Path, num_stages: int, config: dict[str, Any], interval: int
) -> None:
    task = NumberedTask(num_layers=num_stages, dropout=0.2, buffered=not config)  # batch norm on CPU takes no bf16
    options = {"activation_checkpoint_interval": interval}
    run = Run(task=task, num_stages=num_stages, optimizer="adamw", config=config, avgpipe=BLOCK, module_options=options)
    undisturbed = worlds[num_stages].run(train, run, 4, None)
    disturbed = worlds[num_stages].run(train, run, 4, str(tmp_path))
    assert max(flying for _, _, flying, _ in disturbed) > 0, "nothing was in flight at any pause: it proves nothing"
    for (state, losses, _, _), (other_state, other_losses, _, _) in zip(undisturbed, disturbed, strict=True):
        assert losses == other_losses
        assert [name for name, value in state.items() if not torch.equal(other_state[name], value)] == []
    for results in (undisturbed, disturbed):
        check_trained_once_in_order(results[-1][3], 4)


def check_trained_once_in_order(seen: list[int], iterations: int) -> None:
    """Every micro-batch once; those of one pipeline and iteration in their order; further ones are in flight."""
    trained = [number for number in seen if number < iterations * PER_ITERATION]
    assert sorted(trained) == list(range(iterations * PER_ITERATION))
    for run in range(iterations * N):
        assert [number for number in trained if number // M == run] == list(range(run * M, run * M + M))
    assert all(number < (iterations + 1) * PER_ITERATION for number in seen)


def attempt(function: Any, *args: Any, **kwargs: Any) -> str:
    """What a call raised, as text; fails if it raised nothing."""
    try:
        result = function(*args, **kwargs)
    except (Exception, StopIteration) as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    raise AssertionError(f"nothing was raised, got {result}")


def train_in_pieces(run: Run) -> tuple[dict[str, Tensor], list[str], list[int], int]:
    """Six iterations out of loaders that end exactly, in the middle, or are left before their end."""
    engine, task = run.engine(), run.task
    said = []
    SEEN.clear()
    said.append(attempt(engine.train_batch, iter(())))  # empty from the start
    first = task.numbered(0, 12)  # an iteration and a half
    engine.train_batch(first)
    said.append(attempt(engine.train_batch, first))
    engine.eval_batch(task.numbered(500, 502), num_micro_batches=2)
    engine.train_batch(task.numbered(12, 16))  # completes what was kept
    exact = task.numbered(16, 32)
    engine.train_batch(exact)
    engine.train_batch(exact)
    said.append(attempt(engine.train_batch, exact))
    said.append(attempt(engine.train_batch, exact))  # and again
    engine.train_batch(task.numbered(32, 1000))  # left after one iteration; one more was taken
    engine.train_batch(task.numbered(48, 1000))
    assert engine.consumed_micro_batches == 6 * PER_ITERATION
    state = finished(engine)
    engine.close()
    return state, said, list(SEEN), engine.iteration


@pytest.mark.timeout(120)
@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_data_in_pieces_is_trained_exactly_once(worlds: dict[int, World], num_stages: int) -> None:
    run = Run(task=NumberedTask(num_layers=num_stages, dropout=0.2), num_stages=num_stages, avgpipe=BLOCK)
    whole = worlds[num_stages].run(train, run, 6, None)
    pieces = worlds[num_stages].run(train_in_pieces, run)
    check_trained_once_in_order(pieces[-1][2], 6)
    for (state, _, _, _), (other_state, said, _, iterations) in zip(whole, pieces, strict=True):
        assert iterations == 6
        assert [name for name, value in state.items() if not torch.equal(other_state[name], value)] == []
        assert said[0].startswith("DataExhausted: the data iterator is empty")
        assert said[1].startswith("IncompleteIteration: the data ended within iteration 1: 4 micro-batches are left")
        assert said[2] == said[3] and said[2].startswith("DataExhausted: the data ended after 4 iterations")


def all_reductions_after_each_iteration(run: Run) -> list[int]:
    """How many reductions of tied gradients this rank has begun when `train_batch` returns, pipeline 0 being favoured."""
    from avgpipe_ds.execution import pipeline as module

    original = module.priority
    module.priority = lambda *, iteration, pipeline_id, kind: (pipeline_id, iteration)
    try:
        engine, data = run.engine(), run.task.data()
        transport, begun = engine._stage.mailbox.transport, []
        all_reduce = transport.all_reduce
        transport.all_reduce = lambda *args: (begun.append(args), all_reduce(*args))[1]
        counts = []
        for _ in range(4):
            engine.train_batch(data)
            counts.append(len(begun))
        engine.close()
    finally:
        module.priority = original
    return counts


def test_nothing_behind_the_last_backward_of_the_next_iteration(worlds: dict[int, World]) -> None:
    """A pipeline that is far ahead must not start a collective that user code between the calls could see half done."""
    run = Run(task=Task(tied=True), num_micro_batches=2, avgpipe=BLOCK)
    assert worlds[2].run(all_reductions_after_each_iteration, run) == [[N, 2 * N, 3 * N, 4 * N]] * 2
