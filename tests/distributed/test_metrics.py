"""What a loss function reports beside the loss, averaged as the loss is, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.distributed.models import Run, Task, merged, weights_of
from tests.distributed.test_evaluation import TwofoldTask
from tests.distributed.world import World

Model = Callable[[Any, Any], Any]


def with_metrics(outputs: tuple[Tensor, Tensor], labels: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """A tuple of outputs comes as it is; a metric may be a number, an integer tensor, or hang on a graph."""
    values, classes = outputs
    loss = nn.functional.mse_loss(values, labels)
    return loss, {"distance": (values - labels).abs().mean(), "largest class": classes.max(), "rows": len(values)}


@dataclass(frozen=True)
class MetricsTask(TwofoldTask):
    @property
    def loss(self) -> Any:
        return with_metrics


def train(run: Run) -> dict[str, Any]:
    engine = run.engine()
    data = run.task.data(1 + engine.grid.get_data_parallel_rank())
    events: list[Any] = []
    engine.monitor = SimpleNamespace(enabled=True, write_events=events.extend)
    got: dict[str, Any] = {"at first": engine.metrics, "weights": [], "losses": [], "metrics": [], "events": events}
    for _ in range(run.iterations):
        got["weights"].append([weights_of(pipeline.module) for pipeline in engine.pipelines])
        got["losses"].append(float(engine.train_batch(data)))
        got["metrics"].append({name: float(value) for name, value in engine.metrics.items()})
    evaluated = engine.eval_batch(data, num_micro_batches=2)
    got["evaluated"] = float(evaluated)
    engine.close()
    return got


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("num_pipelines", "num_replicas"), [(1, 1), (2, 1), (2, 2)])
def test_metrics_are_the_mean_over_micro_batches_pipelines_and_replicas(
    worlds: dict[int, World], num_pipelines: int, num_replicas: int
) -> None:
    run = Run(task=MetricsTask(num_layers=3), avgpipe={"num_pipelines": num_pipelines}, num_micro_batches=3)
    results = worlds[run.num_stages * num_replicas].run(train, run)
    model = run.task.plain()
    streams = [run.task.data(1 + replica) for replica in range(num_replicas)]
    for iteration in range(run.iterations):
        reported = []
        for stream in streams:
            for pipeline in range(num_pipelines):
                model.load_state_dict(merged([result["weights"][iteration][pipeline] for result in results]))
                with torch.no_grad():
                    reported += [model(*micro_batch) for micro_batch in islice(stream, run.num_micro_batches)]
        assert len(reported) == num_replicas * num_pipelines * run.num_micro_batches
        loss = sum(float(value) for value, _ in reported) / len(reported)
        means = {name: sum(float(metrics[name]) for _, metrics in reported) / len(reported) for name in reported[0][1]}
        for result in results:
            assert result["at first"] == {}
            assert result["losses"][iteration] == pytest.approx(loss, rel=1e-5)
            assert result["metrics"][iteration] == pytest.approx(means, rel=1e-5)
            assert result["evaluated"] == results[0]["evaluated"]
        samples = (iteration + 1) * num_replicas * num_pipelines * run.num_micro_batches * run.task.micro_batch_size
        told = {name: value for name, value, at in results[0]["events"] if at == samples and name != "Train/Samples/lr"}
        expected = {"Train/Samples/train_loss": loss} | {f"Train/{name}": value for name, value in means.items()}
        assert told == pytest.approx(expected, rel=1e-5)
    assert all(result["events"] == [] for result in results[1:])


class Changing:
    """Gives something else from its sixth call on, which is in the second iteration of two micro-batches by two pipelines."""

    def __init__(self, kind: str) -> None:
        self.kind, self.calls = kind, 0

    def __call__(self, outputs: Tensor, labels: Tensor) -> Any:
        self.calls += 1
        loss = nn.functional.mse_loss(outputs, labels)
        if self.kind == "names":
            return loss, {"a" if self.calls < 3 else "b": loss}
        if self.kind == "dictionary":
            return {"loss": loss}
        if self.kind == "two tensors":
            return loss, loss
        return loss, {"each": outputs}


@dataclass(frozen=True)
class ChangingTask(Task):
    kind: str = ""

    @property
    def loss(self) -> Any:
        return Changing(self.kind)


KINDS = {
    "names": "loss_fn must report under the same names each time, but it reports ['a'] before, ['b'] now",
    "dictionary": "the loss must be a scalar tensor, got a dict",
    "two tensors": "the loss must be a scalar tensor, got a tuple of (a tensor of shape (), a tensor of shape ())",
    "rows": "loss_fn reports a tensor of shape (3, 16) as 'each': let it be one number",
}


def fail(run: Run) -> str:
    engine = run.engine()
    data = run.task.data()
    try:
        for _ in range(3):
            engine.train_batch(data)
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    finally:
        engine.close()
    return "trained"


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("kind", "text"), KINDS.items(), ids=KINDS)
def test_what_is_no_loss_is_an_error_on_every_rank(worlds: dict[int, World], kind: str, text: str) -> None:
    run = Run(task=ChangingTask(kind=kind), avgpipe={"num_pipelines": 2}, num_micro_batches=2)
    first, last = worlds[run.num_stages].run(fail, run)
    assert last.startswith(f"ValueError: {text}")
    assert first.startswith(f"RemoteError: rank 1 failed: ValueError: {text}")
