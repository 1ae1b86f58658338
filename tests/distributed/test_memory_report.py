"""Bytes by kind: what is counted is what is there, and one pipeline predicts several."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from avgpipe_ds.memory.report import MemoryReport
from tests.distributed.models import WIDTH, Run, Task
from tests.distributed.world import CaseFailed, World

LAYER = (WIDTH * WIDTH + WIDTH) * 4  # bytes of its weights
MICRO_BATCH = 3 * WIDTH * 4  # bytes of an activation


def report(run: Run, offload: bool = False) -> tuple[MemoryReport, str]:
    engine = run.engine()
    data = run.task.data()
    for _ in range(run.iterations):
        if offload:
            with torch.autograd.graph.save_on_cpu():
                engine.train_batch(data)
        else:
            engine.train_batch(data)
    found = engine.memory_report()
    engine.train_batch(data)
    engine.close()
    return found, str(found)


@pytest.mark.parametrize("num_pipelines", [1, 3])
def test_counted_by_hand(worlds: dict[int, World], num_pipelines: int) -> None:
    """Two layers of four on each of two stages, AdamW; the first layer of each is frozen on stage 0."""
    run = Run(Task(frozen=(0,)), num_micro_batches=4, iterations=4, optimizer="adamw", avgpipe={"num_pipelines": num_pipelines})
    (found, text), (same, _) = worlds[2].run(report, run)
    assert found == same and [stage.stage_id for stage in found.stages] == [0, 1]
    for stage, trained, frozen, together in zip(found.stages, (1, 2), (1, 0), ({1: 2, 3: 5}, {1: 1, 3: 1}), strict=True):
        measured = stage.measured
        assert measured.weights == num_pipelines * trained * LAYER + frozen * LAYER
        assert measured.gradients == num_pipelines * trained * LAYER
        assert measured.optimizer == num_pipelines * (2 * trained * LAYER + 2 * trained * 4)  # two moments, a counter per tensor
        assert measured.reference == (2 * trained * LAYER if num_pipelines > 1 else 0)
        assert replace(stage.predicted, activations=measured.activations) == measured
        micro_batch, rest = divmod(stage.predicted.activations, together[num_pipelines])
        assert rest == 0 and micro_batch > 0
        off_by = abs(measured.activations - stage.predicted.activations)
        assert off_by <= (0 if together[num_pipelines] == together[1] else micro_batch), "how pipelines interleave is a guess"
    assert found.peak_bytes == max(stage.measured.total for stage in found.stages)
    assert len(text.splitlines()) == 7 and "measured / predicted" in text


def test_a_user_s_own_hooks_stay_in_force(worlds: dict[int, World]) -> None:
    """Only the innermost hooks are called: measuring would switch off what offloads activations."""
    with pytest.raises(CaseFailed, match="memory_report.*hooks on saved tensors were in force, such as save_on_cpu"):
        worlds[2].run(report, Run(Task(), iterations=2), True)


def unmeasured(run: Run) -> Any:
    return run.engine().memory_report()


def test_before_training_there_is_nothing_to_tell(worlds: dict[int, World]) -> None:
    with pytest.raises(CaseFailed) as caught:
        worlds[2].run(unmeasured, Run())
    assert all("train an iteration first" in text for text in caught.value.errors.values()) and len(caught.value.errors) == 2


def test_the_momentum_of_a_reference_counts(worlds: dict[int, World]) -> None:
    averaging = {"rule": "sma", "momentum": 0.9}
    run = Run(num_micro_batches=2, iterations=2, avgpipe={"num_pipelines": 2, "averaging": averaging})
    for found, _ in worlds[2].run(report, run):
        for one in found.stages:
            assert one.measured.reference == one.predicted.reference == 3 * 2 * LAYER
