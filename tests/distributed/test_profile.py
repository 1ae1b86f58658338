"""A profile of a running job: what it finds, and that it costs no weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
from torch import Tensor, nn

from avgpipe_ds.tuning.profile import Profile
from tests.distributed.history import assert_same_history, train, whole
from tests.distributed.models import WIDTH, Layer, Run, Task
from tests.distributed.world import CaseFailed, World

MICRO_BATCH = 3 * WIDTH * 4  # bytes of an activation
RUN = Run(
    task=Task(dropout=0.1),
    num_stages=2,
    num_micro_batches=4,
    iterations=6,
    clipping=0.5,
    optimizer="adamw",
    avgpipe={"num_pipelines": 2},
)


def profiled(run: Run, keep: bool, iterations: int = 3) -> Profile:
    engine = run.engine()
    data = run.task.data()
    engine.train_batch(data)
    found = engine.profile(data, iterations=iterations, keep=keep)
    engine.close()
    return found


@dataclass(frozen=True)
class Profiling:
    """A profile of 3 iterations before one of them."""

    iteration: int
    keep: bool

    def __call__(self, engine: Any, data: Any) -> None:
        if engine.iteration == self.iteration:
            engine.profile(data, iterations=3, keep=self.keep)


@pytest.mark.parametrize("before", [0, 2])
def test_state_and_data_are_as_before(worlds: dict[int, World], before: int) -> None:
    """Before anything was trained, and with forwards of the next iteration under way."""
    expected = whole(worlds[2].run(train, RUN))
    assert_same_history(whole(worlds[2].run(train, RUN, Profiling(before, keep=False))), expected, tolerance=0)


def test_or_it_counts_as_training(worlds: dict[int, World]) -> None:
    expected = whole(worlds[2].run(train, replace(RUN, iterations=9)))
    found = whole(worlds[2].run(train, RUN, Profiling(2, keep=True)))
    assert_same_history(found, expected[:2] + expected[5:], tolerance=0)


def test_what_it_finds(worlds: dict[int, World]) -> None:
    found, same = worlds[2].run(profiled, RUN, True)
    assert found == same
    assert (found.num_pipelines, found.num_micro_batches, found.batch, found.clipping) == (2, 4, 12, True)
    first, last = found.stages
    assert first.activation.size == last.gradient.size == MICRO_BATCH
    assert first.gradient.size == last.activation.size == 0
    for stage in found.stages:
        assert [one.samples for one in stage.passes] == [1, 3, 12]
        assert [one.activation_bytes / one.samples for one in stage.passes] == [stage.passes[0].activation_bytes] * 3
        assert [(layer.name, layer.weights) for layer in stage.layers] == [("Layer", 1088)] * 2
        total_s = sum(layer.seconds for layer in stage.layers)
        assert total_s == pytest.approx(stage.passes[1].forward_s + stage.passes[1].backward_s)
        assert stage.step_s > 0 and stage.overhead_s > 0 and max(stage.utilisation) > 0
        state = stage.state
        assert (state.trained, state.gradients, state.frozen) == (2176, 2176, 0)
        assert state.reference == 2 * state.trained and state.optimizer > 2 * state.trained
    assert first.activation.latency_s > 0
    assert [layer.number for stage in found.stages for layer in stage.layers] == [0, 1, 2, 3]


def test_what_can_not_be_split_is_profiled_as_it_is(worlds: dict[int, World]) -> None:
    found, _ = worlds[2].run(profiled, replace(RUN, task=Task(tied=True), avgpipe={"num_pipelines": 1}), True)
    assert [[one.samples for one in stage.passes] for stage in found.stages] == [[1, 3, 12], [1, 3, 12]]
    found, _ = worlds[2].run(profiled, replace(RUN, task=Unsplittable()), True)
    assert [[one.samples for one in stage.passes] for stage in found.stages] == [[3], [1, 3, 12]]


class Unsplittable(Task):
    """The second tensor belongs to all samples together."""

    def layers(self) -> list[Any]:
        from deepspeed.pipe import LayerSpec

        return [LayerSpec(Joined), *super().layers()[1:]]

    def data(self, seed: int = 1) -> Any:
        for inputs, labels in super().data(seed):
            yield (inputs, inputs.mean(0, keepdim=True)[:, 0]), labels


class Joined(nn.Module):
    """Adds a second input that has no entry for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        first, second = inputs
        return self.linear(first) + second


def test_bad_requests(worlds: dict[int, World]) -> None:
    with pytest.raises(CaseFailed) as caught:
        worlds[2].run(profiled, RUN, True, 0)
    assert all("at least 1 iteration, got 0" in text for text in caught.value.errors.values())


def caught_and_went_on(run: Run) -> tuple[str, list[float]]:
    """The data ends within a profile that was not to be kept; training goes on as if there had been none."""
    engine, data = run.engine(), run.task.data()
    engine.train_batch(data)
    with mock.patch("avgpipe_ds.tuning.profiler.probe_stage", side_effect=OSError("a stage that can't be tried")):
        try:
            engine.profile(data, iterations=2, keep=False)
        except Exception as error:  # noqa: BLE001 - its text is compared
            text = f"{type(error).__name__}: {error}"
    losses = [float(engine.train_batch(data)) for _ in range(3)]
    engine.close()
    return text, losses


def test_a_profile_that_fails_costs_nothing(worlds: dict[int, World]) -> None:
    expected = whole(worlds[2].run(train, RUN))
    for text, losses in worlds[2].run(caught_and_went_on, RUN):
        assert "a stage that can't be tried" in text
        assert losses == [snapshot.loss for snapshot in expected[1:4]]


def test_stages_that_recompute_are_profiled_at_their_own_size(worlds: dict[int, World]) -> None:
    found, _ = worlds[2].run(profiled, replace(RUN, module_options={"activation_checkpoint_interval": 1}), True)
    assert [[one.samples for one in stage.passes] for stage in found.stages] == [[3], [3]]
    assert found.stages[0].activation.size == found.stages[1].gradient.size == MICRO_BATCH
    assert all(stage.layers == () for stage in found.stages)


class OneByOne(Layer):
    """As batch normalisation: no single sample."""

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 1:
            raise ValueError("expected more than 1 sample")
        return super().forward(x)


class Normalised(Task):
    def layers(self) -> list[Any]:
        from deepspeed.pipe import LayerSpec

        return [LayerSpec(OneByOne, seed, self.dropout, True) for seed in range(self.num_layers)]


def test_sizes_that_a_model_refuses_are_left_out(worlds: dict[int, World]) -> None:
    found, _ = worlds[2].run(profiled, replace(RUN, task=Normalised()), True)
    assert [[one.samples for one in stage.passes] for stage in found.stages] == [[3, 12], [3, 12]]
