"""`"num_pipelines": "auto"`: one pipeline at first, then as many as were chosen, from the same weights and with no data lost."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from itertools import islice
from typing import Any
from unittest import mock

import pytest
import torch

from avgpipe_ds.config import AvgPipeConfig
from avgpipe_ds.tuning.auto_pipelines import choose_pipelines
from avgpipe_ds.tuning.profile import Profile
from tests.distributed.history import Snapshot, assert_close_states, assert_same_history, train, whole
from tests.distributed.models import Run, Task, weights_of
from tests.distributed.oracle import SingleProcess
from tests.distributed.world import CaseFailed, World

BF16 = {"bf16": {"enabled": True}}
ZERO1 = {"zero_optimization": {"stage": 1}}
PROFILED = 3
FIRST = 2 + PROFILED  # iterations of one pipeline
RUN = Run(
    task=Task(dropout=0.0),
    num_micro_batches=4,
    iterations=FIRST + 3,
    clipping=0.5,
    optimizer="adamw",
    avgpipe={"num_pipelines": "auto", "tuning": {"iterations": PROFILED, "max_pipelines": 3}},
)


def train_three(run: Run) -> tuple[list[Snapshot], int, int, str]:
    """As `train`; whatever the profile of this tiny model says, three pipelines go on."""

    def three(config: AvgPipeConfig, profile: Profile, *, say: bool) -> AvgPipeConfig:
        chosen = choose_pipelines(config, profile, say=say).num_pipelines
        assert isinstance(chosen, int) and 1 <= chosen <= 3 and profile.num_micro_batches == run.num_micro_batches
        return config.with_pipelines(3)

    engines: list[Any] = []
    with mock.patch("avgpipe_ds.engine.choose_pipelines", three), redirect_stdout(StringIO()) as printed:
        history = train(run, lambda engine, data: engines.append(engine))
    return history, engines[0].consumed_micro_batches, engines[0].samples_per_iteration(), printed.getvalue()


def test_one_then_three(worlds: dict[int, World]) -> None:
    """All three start from the weights and the optimizer of the first, with the batches that come next."""
    results = worlds[2].run(train_three, RUN)
    found = whole([history for history, *_ in results])
    consumed = RUN.num_micro_batches * (FIRST + 3 * 3)
    assert [(micro_batches, samples) for _, micro_batches, samples, _ in results] == [(consumed, 3 * 4 * 3)] * 2
    assert [printed.count('"num_pipelines": "auto" goes on with') for *_, printed in results] == [1, 0]
    one = whole(worlds[2].run(train, replace(RUN, avgpipe={"num_pipelines": 1}, iterations=FIRST)))
    assert_same_history(found[: FIRST - 1], one[:-1], tolerance=0)
    last, first = found[FIRST - 1], one[-1]
    assert last.loss == first.loss
    for weights in (*last.weights, last.reference):
        assert_close_states(weights, first.reference, 0, "where the three begin")
    assert [len(snapshot.weights) for snapshot in found[FIRST - 1 :]] == [3] * 4

    single, data = SingleProcess(RUN.task, RUN.optimizer, RUN.clipping), RUN.task.data()
    for _ in range(FIRST):
        single.step(list(islice(data, RUN.num_micro_batches)))
    start = weights_of(single.model)
    trained = []
    for pipeline_id in range(3):
        mine = copy.deepcopy(single)
        mine.step(list(islice(data, RUN.num_micro_batches)))
        trained.append(weights_of(mine.model))
        assert_close_states(found[FIRST].gradients[pipeline_id], mine.gradients, 1e-5, f"gradient of pipeline {pipeline_id}")
    for pipeline_id, weights in enumerate(trained):
        pulled = {name: weights[name] * 2 / 3 + start[name] / 3 for name in start}
        assert_close_states(found[FIRST].weights[pipeline_id], pulled, 1e-6, f"weights of pipeline {pipeline_id}")
    mean = {name: sum(weights[name] for weights in trained) / 3 for name in start}
    assert_close_states(found[FIRST].reference, mean, 1e-6, "reference")


@dataclass(frozen=True)
class Later(Task):
    """The data of pipeline `turn` in the first iteration of several pipelines comes right after that of one."""

    turn: int = 0

    def data(self, seed: int = 1) -> Iterator[tuple[Any, Any]]:
        data = super().data(seed)
        yield from islice(data, FIRST * RUN.num_micro_batches)
        yield from islice(data, self.turn * RUN.num_micro_batches, None)


@pytest.mark.parametrize(
    ("num_ranks", "config"),
    [
        pytest.param(4, {}, id="replicas"),
        pytest.param(2, BF16, id="bf16"),
        pytest.param(4, {**BF16, **ZERO1}, id="replicas-bf16-zero1"),
    ],
)
def test_masters_and_replicas(worlds: dict[int, World], num_ranks: int, config: dict[str, Any]) -> None:
    """As if each of the three had been trained alone from the start, and then been pulled."""
    world, run = worlds[num_ranks], replace(RUN, task=Task(tied=True), config=config, iterations=FIRST + 1)
    found = whole([history for history, *_ in world.run(train_three, run)])
    alone = []
    for turn in range(3):
        single = replace(run, task=Later(tied=True, turn=turn), avgpipe={"num_pipelines": 1})
        alone.append(whole(world.run(train, single)))
    assert_same_history(found[: FIRST - 1], alone[0][: FIRST - 1], tolerance=0)
    mean = {name: sum(history[-1].reference[name] for history in alone) / 3 for name in alone[0][-1].reference}
    assert_close_states(found[-1].reference, mean, 1e-6, "reference")
    start = alone[0][FIRST - 1].reference
    for pipeline_id, history in enumerate(alone):
        pulled = {name: value * 2 / 3 + start[name] / 3 for name, value in history[-1].reference.items()}
        rounded = {name: value.to(found[-1].weights[pipeline_id][name].dtype) for name, value in pulled.items()}
        tolerance = 4e-3 if config else 1e-6  # of bf16, where a sum may round to the neighbour
        assert_close_states(found[-1].weights[pipeline_id], rounded, tolerance, f"weights of pipeline {pipeline_id}")


def resumed(run: Run, folder: str, save: bool) -> tuple[int, dict[str, torch.Tensor], int]:
    engine = run.engine()
    data = run.task.data()
    if save:
        for _ in range(3):
            engine.train_batch(data)
        engine.save_checkpoint(folder)
    else:
        engine.train_batch(data)
        engine.load_checkpoint(folder)
    found = engine.num_pipelines, engine.reference_state_dict(), engine.iteration
    if not save:
        engine.train_batch(data)
    engine.close()
    return found


def test_a_checkpoint_says_how_many(worlds: dict[int, World], tmp_path: Any) -> None:
    saved = worlds[2].run(resumed, replace(RUN, avgpipe={"num_pipelines": 2}), str(tmp_path), True)
    loaded = worlds[2].run(resumed, RUN, str(tmp_path), False)
    for (_, before, _), (number, after, iteration) in zip(saved, loaded, strict=True):
        assert (number, iteration) == (2, 3)
        assert_close_states(after, before, 0, "reference")


def test_nothing_fits(worlds: dict[int, World]) -> None:
    """What would fit is said, on every rank."""
    run = replace(RUN, avgpipe={**(RUN.avgpipe or {}), "memory_limit_gb": 1e-6})
    with pytest.raises(CaseFailed) as caught:
        worlds[2].run(train, run)
    assert sorted(caught.value.errors) == [0, 1]
    for text in caught.value.errors.values():
        assert "no setting fits into the memory limit: N = 1, M = 4, 1F1B needs least" in text


def fails_to_copy(run: Run) -> tuple[str, int]:
    """Rank 1 can't copy its stage; all say so, and one pipeline trains on."""
    engine = run.engine()
    data = run.task.data()
    if engine.global_rank == 1:
        engine._further = Broken()
    for _ in range(FIRST - 1):
        engine.train_batch(data)
    try:
        engine.train_batch(data)
    except Exception as error:  # noqa: BLE001 - its text is compared
        text = f"{type(error).__name__}: {error}"
    engine.train_batch(data)
    found = text, engine.num_pipelines
    engine.close()
    return found


class Broken:
    def copies(self, number: int) -> list[Any]:
        raise MemoryError("no room for another model")


def test_a_rank_that_can_not_copy_its_stage(worlds: dict[int, World]) -> None:
    first, second = worlds[2].run(fails_to_copy, RUN)
    assert first == ("RemoteError: rank 1 failed: MemoryError: no room for another model", 1)
    assert second == ("MemoryError: no room for another model", 1)
