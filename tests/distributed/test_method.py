"""N pipelines train what the formulas of the method say, written down once more in plain torch on one process."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest

from tests.distributed.history import assert_close, assert_same_history, train, whole
from tests.distributed.models import Run, Task, weights_of
from tests.distributed.oracle import SingleProcess, train_by_the_formulas
from tests.distributed.world import World

RULES: dict[str, dict[str, Any]] = {
    "avgpipe": {"rule": "avgpipe"},
    "avgpipe-alpha": {"rule": "avgpipe", "alpha": 0.3},
    "outer-lr": {"rule": "avgpipe", "outer_lr": 1.7},
    "outer-momentum": {"rule": "avgpipe", "alpha": 0.6, "outer_lr": 0.8, "outer_momentum": 0.9},
    "easgd": {"rule": "easgd", "alpha": 0.2},
    "sma": {"rule": "sma", "alpha": 0.25},
    "sma-momentum": {"rule": "sma", "alpha": 0.25, "momentum": 0.8},
}


@pytest.mark.parametrize("averaging", RULES.values(), ids=RULES)
@pytest.mark.parametrize(
    "num_pipelines, num_stages, optimizer",
    [(2, 2, "sgd"), (2, 2, "adamw"), (3, 3, "sgd"), (3, 3, "adamw"), (3, 1, "sgd"), (2, 4, "adamw")],
)
def test_weights_and_reference_follow_the_formulas(
    worlds: dict[int, World], num_pipelines: int, num_stages: int, optimizer: str, averaging: dict[str, Any]
) -> None:
    run = Run(
        task=Task(tied=num_stages == 2),
        num_stages=num_stages,
        num_micro_batches=3,
        iterations=5,
        optimizer=optimizer,
        clipping=0.5,
        avgpipe={"num_pipelines": num_pipelines, "averaging": averaging},
    )
    assert_same_history(whole(worlds[num_stages].run(train, run)), train_by_the_formulas(run))


@pytest.mark.parametrize("alpha", ["auto", 0.1, 1.0])
@pytest.mark.parametrize("num_pipelines", [2, 3])
def test_distance_to_the_reference(worlds: dict[int, World], num_pipelines: int, alpha: float | str) -> None:
    """`d_t = z_t - mean_i(w_i,t)` obeys `d_t = (1 - alpha) d_(t-1) + alpha mean_i(u_i,t)`, u_i being the engine's own.

    It follows from the two formulas of the paper if the pull reads the z of the previous iteration, and from nothing else.
    """
    run = Run(iterations=8, avgpipe={"num_pipelines": num_pipelines, "averaging": {"rule": "avgpipe", "alpha": alpha}})
    history = whole(worlds[2].run(train, run))
    number = 1 / num_pipelines if alpha == "auto" else float(alpha)
    start = weights_of(run.task.plain())
    z, d = start, {name: w.double() * 0 for name, w in start.items()}
    for iteration, snapshot in enumerate(history):
        for name, z_now in snapshot.reference.items():
            mean_u = z_now.double() - z[name].double()  # z <- z + mean_i(u_i)
            d_now = z_now.double() - sum(w[name].double() for w in snapshot.weights) / num_pipelines
            error = float((d_now - ((1 - number) * d[name] + number * mean_u)).abs().max())
            assert error <= 2.0**-22 * float(z_now.abs().max()), f"iteration {iteration}, {name}: off by {error}"
            d[name] = d_now
        z = snapshot.reference
    assert all(float(d[name].norm()) > 1e-3 for name in d)  # not the trivial d = 0 of a pull that waits for the new z


def test_every_pipeline_gets_its_own_run_of_micro_batches(worlds: dict[int, World]) -> None:
    """Gradients of the first iteration, when all models are equal, tell which data a pipeline has trained on."""
    run = Run(num_micro_batches=2, iterations=1, avgpipe={"num_pipelines": 3})
    (ours,) = whole(worlds[2].run(train, run))
    data = list(islice(run.task.data(), 6))
    for i, gradients in enumerate(ours.gradients):
        single = SingleProcess(run.task, run.optimizer)
        single.step(data[2 * i : 2 * i + 2])
        for name, gradient in single.gradients.items():
            assert_close(gradients[name], gradient, 1e-6, f"pipeline {i}, {name}")
