"""One pipeline at advance 0 trains exactly what DeepSpeed's PipelineEngine trains."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.models import FP16_SUPPORTED, Run, Task, merged, weights_of
from tests.distributed.world import World


def train_both(run: Run) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], list[float], list[float]]:
    """Weights and losses of ours and of DeepSpeed's, on this rank."""
    results = []
    for make in (run.engine, run.deepspeed_engine):
        engine = make()
        data = run.task.data()
        losses = [float(engine.train_batch(data)) for _ in range(run.iterations)]
        results.append((weights_of(engine.module), losses))
        if hasattr(engine, "pipelines"):
            engine.close()
    return results[0][0], results[1][0], results[0][1], results[1][1]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("num_micro_batches", [1, 4, 5])
@pytest.mark.parametrize("num_stages", [2, 3])
def test_bit_identical_in_fp32(worlds: dict[int, World], num_stages: int, num_micro_batches: int, optimizer: str) -> None:
    run = Run(
        task=Task(dropout=0.1), num_stages=num_stages, num_micro_batches=num_micro_batches, optimizer=optimizer, iterations=10
    )
    for ours, theirs, our_losses, their_losses in worlds[num_stages].run(train_both, run):
        assert our_losses == their_losses
        assert ours.keys() == theirs.keys()
        for name in ours:
            assert torch.equal(ours[name], theirs[name]), name


@pytest.mark.parametrize(
    "config",
    [
        pytest.param({"zero_optimization": {"stage": 1}}, id="zero1"),
        pytest.param({"bf16": {"enabled": True}}, id="bf16"),
        pytest.param({"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}, id="bf16-zero1"),
        pytest.param(
            {"fp16": {"enabled": True, "initial_scale_power": 8}},
            id="fp16",
            marks=pytest.mark.skipif(not FP16_SUPPORTED, reason="DeepSpeed refuses fp16 on this CPU"),
        ),
    ],
)
def test_equal_within_rounding_with_zero1_and_bf16(worlds: dict[int, World], config: dict[str, object]) -> None:
    run = Run(task=Task(tied=True), num_stages=2, optimizer="adamw", iterations=10, config=config, clipping=0.5)
    tolerance = 1e-6 if config.keys() == {"zero_optimization"} else 1e-2
    results = worlds[2].run(train_both, run)
    merged([ours for ours, _, _, _ in results])
    for ours, theirs, our_losses, their_losses in results:
        assert our_losses == pytest.approx(their_losses, rel=tolerance)
        for name in ours:
            torch.testing.assert_close(ours[name], theirs[name], rtol=tolerance, atol=tolerance, msg=name)
