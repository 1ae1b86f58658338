"""Layers that do not train: whole stages of them work, and all pipelines share their memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.distributed.history import assert_same_history, train, whole
from tests.distributed.models import Run, Task
from tests.distributed.oracle import train_by_the_formulas, train_on_one_process
from tests.distributed.world import World

FROZEN = {"first": (0,), "middle": (1,), "last": (2,), "first-two": (0, 1), "parts": (0, 3)}


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("frozen", FROZEN.values(), ids=FROZEN)
@pytest.mark.parametrize("num_pipelines", [1, 2])
def test_frozen_stages(worlds: dict[int, World], num_pipelines: int, frozen: tuple[int, ...], optimizer: str) -> None:
    """Three layers are one per stage, six are two per stage: the last case has stages that train in part."""
    task = Task(num_layers=6 if 3 in frozen else 3, frozen=frozen)
    run = Run(task=task, num_stages=3, optimizer=optimizer, clipping=0.05, avgpipe={"num_pipelines": num_pipelines})
    expected = train_on_one_process(run) if num_pipelines == 1 else train_by_the_formulas(run)
    assert_same_history(whole(worlds[3].run(train, run)), expected)


class HalfPrecisionInputs(Task):
    """DeepSpeed leaves it to the data to come in bf16."""

    def data(self, seed: int = 1) -> Iterator[tuple[Any, Any]]:
        return ((inputs.bfloat16(), labels.bfloat16()) for inputs, labels in super().data(seed))


def storages(run: Run) -> dict[str, tuple[bool, list[int]]]:
    """By parameter: whether it trains, and where the memory of each pipeline's copy is, after training."""
    engine = run.engine()
    data = run.task.data()
    before = {name: p.detach().clone() for name, p in engine.module.named_parameters() if not p.requires_grad}
    losses = [float(engine.train_batch(data)) for _ in range(run.iterations)]
    assert all(torch.isfinite(torch.tensor(losses)))
    copies: dict[str, tuple[bool, list[int]]] = {}
    for pipeline in engine.pipelines:
        for name, p in pipeline.module.named_parameters():
            copies.setdefault(name, (p.requires_grad, []))[1].append(p.data_ptr())
            assert p.requires_grad or torch.equal(p, before[name])
    engine.close()
    return copies


@pytest.mark.parametrize(
    "config",
    [
        pytest.param({}, id="fp32"),
        pytest.param({"zero_optimization": {"stage": 1}}, id="zero1"),
        pytest.param({"bf16": {"enabled": True}}, id="bf16"),
        pytest.param({"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}, id="bf16-zero1"),
    ],
)
@pytest.mark.parametrize("frozen", [(0, 2), (0, 1), (2, 3)], ids=["parts", "first-stage", "last-stage"])
def test_frozen_parameters_are_stored_once(worlds: dict[int, World], frozen: tuple[int, ...], config: dict[str, Any]) -> None:
    run = Run(task=Task(frozen=frozen), optimizer="adamw", config=config, avgpipe={"num_pipelines": 3})
    if "bf16" in config:
        run = replace(run, task=HalfPrecisionInputs(frozen=frozen))
    for copies in worlds[2].run(storages, run):
        for name, (trains, places) in copies.items():
            assert len(set(places)) == (3 if trains else 1), name
