"""Same seed, same bits, however stages and messages are delayed and the executor interleaves the pipelines."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed import shaky
from tests.distributed.models import Run, weights_of
from tests.distributed.world import World

RUNS = 5
ITERATIONS = 4


def train_shaken(run: Run) -> tuple[dict[str, torch.Tensor], list[float], list[int]]:
    """All weights, all losses, and in which order the pipelines ran on this rank."""
    with shaky.shaky_links(0.003), shaky.shaky_executor():
        engine = run.engine()
        data = run.task.data(seed=engine.grid.get_data_parallel_id())
        shaky.FORWARDS.clear()
        losses = [float(engine.train_batch(data)) for _ in range(ITERATIONS)]
        weights = {f"z.{name}": value for name, value in engine.reference_state_dict().items()}
        owners: dict[int, int] = {}
        for pipeline in engine.pipelines:
            weights |= {f"{pipeline.pipeline_id}.{name}": value for name, value in weights_of(pipeline.module).items()}
            owners |= {id(layer): pipeline.pipeline_id for layer in pipeline.module.modules()}
        order = [owners[layer] for layer in shaky.FORWARDS]
        engine.close()
    return weights, losses, order


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("num_stages", "size", "config"),
    [
        pytest.param(2, 2, {}, id="K2"),
        pytest.param(3, 3, {"gradient_clipping": 0.5}, id="K3-clipping"),
        pytest.param(2, 4, {"gradient_clipping": 0.5, "zero_optimization": {"stage": 1}}, id="K2-D2-zero1"),
    ],
)
def test_five_shaken_runs_are_equal(worlds: dict[int, World], num_stages: int, size: int, config: dict[str, Any]) -> None:
    block = {"num_pipelines": 3, "schedule": {"name": "advance_forward", "advance": 1}}
    task = shaky.ShakyTask(num_layers=num_stages, dropout=0.2)
    run = Run(task=task, num_stages=num_stages, optimizer="adamw", config=config, avgpipe=block)
    shaken = [worlds[size].run(train_shaken, run) for _ in range(RUNS)]

    orders = {tuple(tuple(order) for _, _, order in results) for results in shaken}
    assert len(orders) > 1, "the delays changed no order, so equal weights prove nothing"
    for rank in range(size):
        weights, losses, _ = shaken[0][rank]
        trained = [name.partition(".")[2] for name in weights if name.startswith("0.") and name.endswith("weight")]
        assert trained and all(not torch.equal(weights[f"0.{name}"], weights[f"1.{name}"]) for name in trained)
        for other_weights, other_losses, _ in (results[rank] for results in shaken[1:]):
            assert other_losses == losses
            assert all(torch.equal(other_weights[name], value) for name, value in weights.items())
