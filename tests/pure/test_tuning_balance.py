"""Boundaries by the measured times of layers."""

from __future__ import annotations

import pytest

from avgpipe_ds.memory.model_state import ModelState
from avgpipe_ds.tuning.balance import propose_partition
from avgpipe_ds.tuning.profile import Layer, Passes, Profile, StageProfile
from avgpipe_ds.tuning.setting import Setting

ONE = Setting(num_pipelines=1, num_micro_batches=4)
PASS = Passes(samples=1, forward_s=1.0, backward_s=2.0, activation_bytes=1)


def profile(*stages: list[float], **kinds: int) -> Profile:
    """Stages of layers that take so many seconds, 100 bytes of weights each."""
    numbers = iter(range(100))
    found = tuple(
        StageProfile(
            passes=(PASS,),
            layers=tuple(
                Layer(name="Block", number=next(numbers), seconds=seconds, weights=100, activation_bytes=10) for seconds in layers
            ),
            state=ModelState(trained=100 * len(layers), **kinds),
        )
        for layers in stages
    )
    return Profile(num_pipelines=1, num_micro_batches=4, batch=4, clipping=False, stages=found)


def test_a_slow_head_gets_fewer_layers():
    """By parameters the stages are equal."""
    found = propose_partition(profile([1, 1, 1], [1, 1, 4]), ONE)
    assert found is not None and found.partition in ((0, 5, 6), (0, 4, 6)) and found.gain == pytest.approx(1 / 6)


def test_even_stages_stay_as_they_are():
    assert propose_partition(profile([1, 1, 1], [1, 1, 1.05]), ONE) is None
    assert propose_partition(profile([2, 2], [2, 2]), ONE) is None


def test_layers_that_can_not_be_told_apart():
    whole = profile([1, 1, 1], [1, 1, 4])
    assert propose_partition(whole.model_copy(update={"stages": (whole.stages[0], StageProfile(passes=(PASS,)))}), ONE) is None


def test_memory_keeps_stages_short():
    """A layer needs 100 bytes of weights for each pipeline, and activations of the two micro-batches of each that are stored."""
    uneven = profile([1, 1, 1], [1, 1, 4])
    assert propose_partition(uneven, ONE, memory_limit=3 * 120) is None
    found = propose_partition(uneven, ONE, memory_limit=4 * 120)
    assert found is not None and found.partition == (0, 4, 6)
    assert propose_partition(uneven, Setting(num_pipelines=2, num_micro_batches=4), memory_limit=4 * 120) is None
