"""Everything that `deepspeed.initialize` takes for a pipeline is copied for N of them: layers, losses, optimizers, schedulers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.distributed.history import Snapshot, assert_close_states, assert_same_history, train, whole
from tests.distributed.models import WIDTH, Layer, Run, Task, head, weights_of
from tests.distributed.oracle import Method, train_by_the_formulas, train_on_one_process
from tests.distributed.world import World


class ScaledError(nn.Module):
    """A loss with state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(0.7))

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return self.scale * nn.functional.mse_loss(outputs, labels)


@dataclass(frozen=True)
class Mixed(Task):
    """Specs, module instances, a container of modules, functions and lambdas; a module as loss."""

    def layers(self) -> list[Any]:
        from deepspeed.pipe import LayerSpec

        return [
            Layer(0),
            torch.tanh,
            LayerSpec(Layer, 1),
            lambda x: 2 * x,
            nn.Sequential(Layer(2), nn.Tanh(), Layer(3)),
            LayerSpec(nn.Identity),
        ]

    @property
    def loss(self) -> Any:
        return ScaledError()


@dataclass(frozen=True)
class TiedThrice(Task):
    """One group tied across all stages, with weight and bias; a second one across first and last stage, called in two ways."""

    def layers(self) -> list[Any]:
        from deepspeed.pipe import LayerSpec, TiedLayerSpec

        def shared() -> Any:
            return TiedLayerSpec("shared", Layer, 5, tied_weight_attr=["linear.weight", "linear.bias"])

        return [
            TiedLayerSpec("ends", Square),
            shared(),
            LayerSpec(Layer, 0),
            shared(),
            shared(),
            TiedLayerSpec("ends", Square, forward_fn=head),
        ]


class Square(nn.Module):
    """A matrix that `head` applies transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(9)) / WIDTH**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def mean_square(x: Tensor) -> Tensor:
    return x.square().mean()


@dataclass(frozen=True)
class LossInside(Task):
    """No `loss_fn`: the last layer returns the loss. No labels either."""

    def layers(self) -> list[Any]:
        from deepspeed.pipe import LayerSpec

        return [LayerSpec(Layer, 0), LayerSpec(Layer, 1), LayerSpec(Layer, 2), mean_square]

    @property
    def loss(self) -> Any:
        return None

    def data(self, seed: int = 1) -> Iterator[tuple[Any, Any]]:
        return ((inputs, None) for inputs, _ in super().data(seed))


@pytest.mark.parametrize("num_pipelines", [1, 2])
@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("task", [Mixed(), TiedThrice(), LossInside()], ids=lambda task: type(task).__name__)
def test_layers_and_losses(worlds: dict[int, World], task: Task, num_stages: int, num_pipelines: int) -> None:
    run = Run(task=task, num_stages=num_stages, clipping=0.05, avgpipe={"num_pipelines": num_pipelines})
    expected = train_on_one_process(run) if num_pipelines == 1 else train_by_the_formulas(run)
    assert_same_history(whole(worlds[num_stages].run(train, run)), expected)


def biases_and_matrices(parameters: Any) -> list[dict[str, Any]]:
    """Two parameter groups, with rates and momenta of their own."""
    parameters = list(parameters)
    return [
        {"params": [p for p in parameters if p.dim() == 1], "lr": 0.1, "momentum": 0.5},
        {"params": [p for p in parameters if p.dim() > 1], "lr": 0.02, "momentum": 0.9},
    ]


def halving(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def as_instance(module: Any) -> dict[str, Any]:
    return {"optimizer": sgd(module.parameters())}


def as_instance_with_groups(module: Any) -> dict[str, Any]:
    return {"optimizer": sgd(biases_and_matrices(module.parameters()))}


def as_instance_of_trained_parameters(module: Any) -> dict[str, Any]:
    return {"optimizer": sgd(p for p in module.parameters() if p.requires_grad)}


def as_callable(module: Any) -> dict[str, Any]:
    return {"optimizer": sgd}


def as_callable_with_groups(module: Any) -> dict[str, Any]:
    return {"optimizer": sgd, "model_parameters": biases_and_matrices(module.parameters())}


def as_configuration(module: Any) -> dict[str, Any]:
    return {}


def as_configuration_with_groups(module: Any) -> dict[str, Any]:
    return {"model_parameters": biases_and_matrices(module.parameters())}


def with_scheduler_instance(module: Any) -> dict[str, Any]:
    optimizer = sgd(module.parameters())
    return {"optimizer": optimizer, "lr_scheduler": halving(optimizer)}


def with_scheduler_callable(module: Any) -> dict[str, Any]:
    return {"optimizer": sgd, "lr_scheduler": halving}


def with_both(module: Any) -> dict[str, Any]:
    """An optimizer that exists, with groups, and a scheduler that is made for it."""
    return {"optimizer": sgd(biases_and_matrices(module.parameters())), "lr_scheduler": halving}


FORMS = [
    as_instance,
    as_instance_with_groups,
    as_instance_of_trained_parameters,
    as_callable,
    as_callable_with_groups,
    as_configuration,
    as_configuration_with_groups,
    with_scheduler_instance,
    with_scheduler_callable,
    with_both,
]


def train_with(run: Run, form: Callable[[Any], dict[str, Any]]) -> list[Snapshot]:
    """As `history.train`, with what `form` makes of the module as further arguments of `initialize`."""
    import avgpipe_ds

    module = run.task.pipeline(run.num_stages)
    arguments = form(module)
    config = run.deepspeed_config()
    if "optimizer" not in arguments:
        config["optimizer"] = {"type": "SGD", "params": {"lr": 0.05}}
    engine, optimizer, _, scheduler = avgpipe_ds.initialize(model=module, config=config, **arguments)
    assert optimizer is engine.optimizer is engine.pipelines[0].optimizer
    assert (scheduler is None) == ("lr_scheduler" not in arguments)
    data = run.task.data()
    history = []
    for _ in range(run.iterations):
        loss = float(engine.train_batch(data))
        weights = [weights_of(pipeline.module) for pipeline in engine.pipelines]
        history.append(Snapshot(loss, None, [], weights, engine.reference_state_dict()))
    engine.close()
    return history


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
@pytest.mark.parametrize("frozen", [(), (1,)], ids=["all-train", "some-frozen"])
def test_optimizers_and_schedulers(
    worlds: dict[int, World], form: Callable[[Any], dict[str, Any]], frozen: tuple[int, ...]
) -> None:
    run = Run(task=Task(frozen=frozen), avgpipe={"num_pipelines": 2})
    ours = whole(worlds[2].run(train_with, run, form))
    method = Method(run)
    for single in method.models:
        grouped = "groups" in form.__name__ or form is with_both
        single.optimizer = sgd(biases_and_matrices(single.trained) if grouped else single.trained)
    schedulers = [halving(single.optimizer) for single in method.models] if form.__name__.startswith("with") else []
    expected = []
    for _ in range(run.iterations):
        expected.append(method.iterate())
        for scheduler in schedulers:
            scheduler.step()
    assert_same_history(ours, expected)


@dataclass(frozen=True)
class Normalised(Task):
    """With buffers that every forward changes."""

    def layers(self) -> list[Any]:
        from deepspeed.pipe import LayerSpec

        norm = LayerSpec(nn.BatchNorm1d, WIDTH)
        return [LayerSpec(Layer, 0), norm, LayerSpec(Layer, 1), norm, LayerSpec(Layer, 2)]


@pytest.mark.parametrize("num_stages", [1, 2])
def test_buffers_are_those_after_the_iteration(worlds: dict[int, World], num_stages: int) -> None:
    """However many forwards of the next one the pipelines that stepped first have already run."""
    avgpipe = {"num_pipelines": 3, "schedule": {"name": "gpipe"}}
    run = Run(task=Normalised(), num_stages=num_stages, avgpipe=avgpipe)
    for ours, expected in zip(whole(worlds[num_stages].run(train, run)), train_by_the_formulas(run), strict=True):
        assert_close_states(ours.reference, expected.reference, 1e-6, "reference")
