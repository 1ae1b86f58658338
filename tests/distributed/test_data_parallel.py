"""Replicas beside pipelines: stages times replicas train what one process trains on the data of all replicas."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.history import assert_same_history, train, whole
from tests.distributed.models import Run, Task
from tests.distributed.oracle import train_by_the_formulas, train_on_one_process
from tests.distributed.world import World

BF16 = {"bf16": {"enabled": True}}
ZERO1 = {"zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}  # DeepSpeed has not tested SGD


EXACT = [
    pytest.param({}, id="fp32"),
    pytest.param({"prescale_gradients": True}, id="prescale"),
    pytest.param({"gradient_predivide_factor": 3.0}, id="predivide"),
    pytest.param(ZERO1, id="zero1"),
]
ROUNDED = [pytest.param(BF16, id="bf16"), pytest.param({**BF16, **ZERO1}, id="bf16-zero1")]


def check(worlds: dict[int, World], run: Run, tolerance: float = 1e-6) -> None:
    assert run.avgpipe is not None
    alone = run.avgpipe["num_pipelines"] == 1
    expected = train_on_one_process(run, num_replicas=2) if alone else train_by_the_formulas(run, num_replicas=2)
    assert_same_history(whole(worlds[2 * run.num_stages].run(train, run)), expected, tolerance)


@pytest.mark.parametrize("config", EXACT)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("num_pipelines", [1, 2])
def test_two_stages_by_two_replicas(worlds: dict[int, World], num_pipelines: int, tied: bool, config: dict[str, Any]) -> None:
    avgpipe = {"num_pipelines": num_pipelines}
    check(worlds, Run(task=Task(tied=tied), num_micro_batches=3, clipping=0.05, config=config, avgpipe=avgpipe))


@pytest.mark.parametrize("config", ROUNDED)
@pytest.mark.parametrize("num_pipelines", [1, 2])
def test_two_stages_by_two_replicas_in_bf16(worlds: dict[int, World], num_pipelines: int, config: dict[str, Any]) -> None:
    run = Run(task=Task(tied=True), num_micro_batches=3, clipping=0.05, config=config, avgpipe={"num_pipelines": num_pipelines})
    check(worlds, run, tolerance=2e-2)


@pytest.mark.parametrize("num_pipelines", [1, 2])
def test_replicas_alone(worlds: dict[int, World], num_pipelines: int) -> None:
    check(worlds, Run(num_stages=1, optimizer="adamw", clipping=0.05, avgpipe={"num_pipelines": num_pipelines}))
