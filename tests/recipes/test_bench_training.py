"""Every contender of the benchmark trains what one process trains: a pipeline that is fast and wrong would win every table."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from bench.contenders import Contender, all_contenders
from bench.layers import Times, mean_squared_error
from bench.workload import Samples, Workload
from common.process_groups import released_process_groups
from torch import Tensor, nn

from tests.distributed.world import World

NUM_STAGES = 2
MICRO_BATCHES = 4
TOLERANCE = 1e-5
# SGD, since Adam's steps would be the same if gradients were M times too large.
WORKLOAD = Workload(
    mode="real",
    num_stages=NUM_STAGES,
    batch=24,  # can be shared by 2, 3 and 4
    length=6,
    width=64,
    times=Times(fixed_s=0.0, forward_s=0.0, input_gradient_s=0.0, weight_gradient_s=0.0),
    layers_per_chunk=1,
    clipping=0.0,
    optimizer="sgd",
    learning_rate=4.0,
)
CLIPPED = replace(WORKLOAD, clipping=0.2)
CONTENDERS = all_contenders()

Losses = list[float | None]
Weights = dict[str, Tensor]


def train(contender: Contender, workload: Workload, iterations: int) -> tuple[Losses, Weights, int]:
    """On one rank: the losses that it knows, its weights, and how many threads of gloo's are left over."""
    threads = count_gloo_threads()
    with released_process_groups():
        training = contender.build(workload, contender.fixed(MICRO_BATCHES))
        losses = [training.train_batch() for _ in range(iterations)]
        weights = training.weights()
        training.close()
        del training
    return [None if loss is None else float(loss) for loss in losses], weights, count_gloo_threads() - threads


def count_gloo_threads() -> int:
    """0 on systems that can't tell."""
    return sum("gloo" in path.read_text() for path in Path("/proc/self/task").glob("*/comm"))


class Alone:
    """The whole model in plain torch."""

    def __init__(self, workload: Workload) -> None:
        self.clipping = workload.clipping
        self.model = nn.Sequential(*(workload.chunk(index) for index in range(workload.num_chunks)))
        self.optimizer = workload.make_optimizer(self.model.parameters())

    def step(self, samples: Samples) -> float:
        inputs, labels = samples
        loss = mean_squared_error(self.model(inputs), labels)
        self.optimizer.zero_grad()
        loss.backward()
        if self.clipping:
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.clipping)
            assert norm > 2 * self.clipping, f"clipping at {self.clipping} has nothing to do: the norm is {norm}"
        self.optimizer.step()
        return float(loss.detach())

    def weights(self) -> dict[str, Tensor]:
        return {name: weight.detach().clone() for name, weight in self.model.named_parameters()}


def expected(workload: Workload, contender: Contender, iterations: int) -> tuple[Losses, Weights]:
    """One model for all iterations; of several pipelines the reference after the first: the mean, as nothing pulled at it yet."""
    data, num_pipelines = workload.batches(), contender.num_pipelines
    if contender.batches_per_iteration < num_pipelines:
        data = zip(*(tensor.chunk(num_pipelines) for tensor in next(data)), strict=True)
    if num_pipelines == 1:
        alone = Alone(workload)
        return [alone.step(samples) for samples in islice(data, iterations)], alone.weights()
    models = [Alone(workload) for _ in range(num_pipelines)]
    losses = [model.step(samples) for model, samples in zip(models, data, strict=False)]
    states = [model.weights() for model in models]
    return [sum(losses) / num_pipelines], {name: torch.stack([s[name] for s in states]).mean(dim=0) for name in states[0]}


def mean_over_ranks(losses: list[Losses]) -> list[float]:
    known = [[loss for loss in ranks if loss is not None] for ranks in zip(*losses, strict=True)]
    return [sum(ranks) / len(ranks) for ranks in known]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    found = World(NUM_STAGES)
    yield found
    found.stop()


@pytest.mark.distributed
@pytest.mark.timeout(240)
@pytest.mark.parametrize("workload", [WORKLOAD, CLIPPED], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("contender", CONTENDERS, ids=lambda contender: contender.key)
def test_trains_what_one_process_trains(world: World, contender: Contender, workload: Workload) -> None:
    iterations = 2 if contender.num_pipelines == 1 else 1
    losses, weights = expected(workload, contender, iterations)
    ranks = world.run(train, contender, workload, iterations)
    assert mean_over_ranks([found for found, _, _ in ranks]) == pytest.approx(losses, rel=TOLERANCE)
    untrained = Alone(workload).weights()
    assert set().union(*(found for _, found, _ in ranks)) == weights.keys()
    for _, found, left_over in ranks:
        assert left_over == 0, "process groups stay alive and would take time from the contenders that come next"
        for name, weight in found.items():
            scale = float(weights[name].norm())
            assert float((weight - weights[name]).norm()) <= TOLERANCE * scale, name
    moved = [float((weights[name] - untrained[name]).norm() / weights[name].norm()) for name in weights if "weight" in name]
    assert min(moved) > 100 * TOLERANCE  # or the comparison would say nothing
