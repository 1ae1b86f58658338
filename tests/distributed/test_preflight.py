"""The check before training: what it finds in bad models and bad data, on every rank, and that it leaves no trace."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from avgpipe_ds.preflight import Report
from tests.distributed.history import assert_same_history, train, whole
from tests.distributed.models import CLASSES, OPTIMIZERS, VOCABULARY, WIDTH, Embedding, Layer, Plain, Run, Task, head, token_loss
from tests.distributed.test_frozen import HalfPrecisionInputs
from tests.distributed.world import CaseFailed, World

BATCH, LENGTH = 3, 4


class WithMask(nn.Module):
    """Hands on a float mask beside its output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer(0)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x), torch.ones(len(x), 1)


def masked(inputs: tuple[Tensor, Tensor]) -> Tensor:
    return inputs[0] * inputs[1]


class Detached(Layer):
    """A stage of its own graph: what comes before learns nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.detach())


class Broken(Layer):
    """Weights that were never initialised."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        with torch.no_grad():
            self.linear.bias[0] = float("nan")


class Overflowing(nn.Module):
    """Finite weights and inputs, infinite outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((WIDTH,), 1e30))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale * self.scale


class SteepRoot(nn.Module):
    """Finite outputs, infinite gradients: the root of zero."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift.square().sqrt()


class Unused(Layer):
    """Has a parameter that its forward does not need."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.spare = nn.Parameter(torch.zeros(WIDTH))


class Looks(nn.Module):
    """An embedding of torch, and batch normalisation, whose buffers change in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(0.5)

    def forward(self, ids: Tensor) -> Tensor:
        return self.dropout(self.norm(self.words(ids)))


def mean_over_samples(x: Tensor) -> Tensor:
    return x.mean(0)


def in_a_dict(x: Tensor) -> Any:
    return {"hidden": x}


def each(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs - labels).square().mean(-1)


def no_loss(outputs: Tensor, labels: Tensor) -> Tensor:
    return labels.float().mean()


def features() -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(BATCH, WIDTH, generator=generator), torch.randn(BATCH, WIDTH, generator=generator)


def classified(classes: tuple[int, ...]) -> tuple[Any, Any]:
    return features()[0], torch.tensor(classes)


@dataclass(frozen=True)
class Case:
    """A model of as many layers as there are, and what is expected: severity, place and text of the problems, as patterns."""

    layers: Callable[[], list[Any]]
    expected: tuple[tuple[str, str, str], ...] = ()
    loss: Any = nn.functional.mse_loss
    data: Callable[[], Any] = features
    frozen: tuple[int, ...] = ()


def spec(*layer: Any) -> Any:
    from deepspeed.pipe import LayerSpec

    return LayerSpec(*layer)


def tied(*function: Any) -> Any:
    from deepspeed.pipe import TiedLayerSpec

    return TiedLayerSpec("embedding", Embedding, **({"forward_fn": function[0]} if function else {}))


HEAD = nn.Linear, WIDTH, CLASSES
CASES: dict[str, Case] = {
    "sound": Case(lambda: [spec(Layer, 0), spec(Layer, 1)]),
    "sound, tied": Case(
        lambda: [tied(), spec(Layer, 0), spec(Layer, 1), tied(head)],
        loss=token_loss,
        data=lambda: next(Task(tied=True).data()),
    ),
    "float without gradient": Case(
        lambda: [spec(WithMask), masked],
        (
            ("warning", "stage 0, to the next one", r"float tensor \(3, 1\), output 1, travels without gradient"),
            ("warning", "stage 1", "nothing to train"),
        ),
    ),
    "detached": Case(
        lambda: [spec(Layer, 0), spec(Detached, 1)],
        (("error", r"stage 1, layer 1 \(Detached\)", "does not depend on its input"),),
    ),
    "NaN weights": Case(
        lambda: [spec(Layer, 0), spec(Broken, 1)],
        (("error", r"stage 1, layer 1 \(Broken\)", "1.linear.bias is not finite"),),
    ),
    "overflow": Case(
        lambda: [spec(Layer, 0), spec(Overflowing)],
        (("error", r"stage 1, layer 1 \(Overflowing\)", f"{BATCH * WIDTH} of {BATCH * WIDTH} numbers in its output 0"),),
    ),
    "infinite gradient": Case(
        lambda: [spec(SteepRoot), spec(Layer, 0)],
        (("error", r"stage 0, layer 0 \(SteepRoot\)", "0.shift is given a gradient that is not finite"),),
    ),
    "frozen stage": Case(lambda: [spec(Layer, 0), spec(Layer, 1)], (("warning", "stage 0", "nothing to train"),), frozen=(0,)),
    "all frozen": Case(
        lambda: [spec(Layer, 0), spec(Layer, 1)],
        (
            ("error", "loss", "does not depend on any parameter"),
            ("warning", "stage 0", "nothing to train"),
            ("warning", "stage 1", "nothing to train"),
        ),
        frozen=(0, 1),
    ),
    "unused parameter": Case(
        lambda: [spec(Layer, 0), spec(Unused, 1)],
        (("warning", r"stage 1, layer 1 \(Unused\)", "1.spare is given no gradient"),),
    ),
    "wrong class": Case(
        lambda: [spec(Layer, 0), spec(*HEAD)],
        (("error", "data", "labels from 7 to 7, but the model has the classes 0 to 4"),),
        loss=nn.functional.cross_entropy,
        data=lambda: classified((0, 7, 1)),
    ),
    "class that the loss ignores": Case(
        lambda: [spec(Layer, 0), spec(*HEAD)],
        (("warning", "data", "labels from 7 to 7"),),
        loss=lambda outputs, labels: nn.functional.cross_entropy(outputs, labels, ignore_index=7),
        data=lambda: classified((0, 7, 1)),
    ),
    "no target": Case(
        lambda: [spec(Layer, 0), spec(*HEAD)],
        (("error", "loss", "it is nan, of finite outputs: is it a mean over no targets"),),
        loss=nn.functional.cross_entropy,
        data=lambda: classified((-100, -100, -100)),
    ),
    "wrong id": Case(
        lambda: [spec(Looks), spec(Layer, 1)],
        (("error", r"stage 0, layer 0 \(Looks\)", "IndexError: 0.words.weight has the rows 0 to 10, asked for are 1 to 11"),),
        data=lambda: (torch.tensor([1, 2, VOCABULARY]), features()[1]),
    ),
    "lost samples": Case(
        lambda: [spec(Layer, 0), mean_over_samples, spec(Layer, 1)],
        (
            ("warning", r"stage \d, layer 1 \(mean_over_samples\)", r"3 samples come in, .*: float32\[16\]\*"),
            ("warning", "loss", "target size"),
        ),
    ),
    "no tensor travels": Case(
        lambda: [spec(Layer, 0), in_a_dict, spec(Layer, 1), spec(Layer, 2)],
        (("error", "stage 0", "must return a tensor or a tuple of tensors for the next stage, got a dict"),),
    ),
    "a layer raises": Case(
        lambda: [spec(Layer, 0), spec(nn.Linear, WIDTH + 1, WIDTH)],
        (("error", r"stage 1, layer 1 \(Linear\)", "RuntimeError: mat1 and mat2"),),
    ),
    "vector for a loss": Case(
        lambda: [spec(Layer, 0), spec(Layer, 1)],
        (("error", "loss", r"must be a scalar tensor, got a tensor of shape \(3,\)"),),
        loss=each,
    ),
    "loss of the labels alone": Case(
        lambda: [spec(Layer, 0), spec(Layer, 1)], (("error", "loss", "does not depend on the outputs"),), loss=no_loss
    ),
    "no inputs": Case(
        lambda: [spec(Layer, 0), spec(Layer, 1)],
        (("error", r"stage 0, layer 0 \(Layer\)", "TypeError"),),
        data=lambda: ((), features()[1]),
    ),
    "no labels": Case(
        lambda: [spec(Layer, 0), spec(Layer, 1)],
        (("error", "loss", "AttributeError|TypeError"),),
        data=lambda: (features()[0], None),
    ),
    "no pair": Case(
        lambda: [spec(Layer, 0), spec(Layer, 1)],
        (("error", "data", r"must give pairs \(inputs, labels\)"),),
        data=lambda: features()[0],
    ),
}


@dataclass(frozen=True)
class Outcome:
    """Of a check on one rank."""

    report: Report
    left_a_trace: list[str] = field(default_factory=list)


def checked(name: str) -> Outcome:
    from deepspeed.pipe import PipelineModule

    from avgpipe_ds.preflight import preflight

    case = CASES[name]
    module = PipelineModule(case.layers(), num_stages=2, loss_fn=case.loss, partition_method="uniform")
    for layer, function in enumerate(module.forward_funcs, module._local_start):
        if isinstance(function, nn.Module) and layer in case.frozen:
            function.requires_grad_(False)
    state = {key: value.clone() for key, value in module.state_dict().items()}
    random, functions = torch.get_rng_state(), module.forward_funcs
    module.eval()
    report = preflight(module, case.data())
    trace = [key for key, value in module.state_dict().items() if not torch.equal(value.nan_to_num(), state[key].nan_to_num())]
    trace += [key for key, weight in module.named_parameters() if weight.grad is not None]
    trace += ["random state"] * (not torch.equal(random, torch.get_rng_state()))
    trace += ["mode"] * module.training + ["layers"] * (module.forward_funcs is not functions)
    return Outcome(report, trace)


def all_checked() -> dict[str, Outcome]:
    return {name: checked(name) for name in CASES}


@pytest.fixture(scope="module")
def outcomes(worlds: dict[int, World]) -> list[dict[str, Outcome]]:
    """By rank."""
    return worlds[2].run(all_checked)


@pytest.mark.parametrize("name", CASES)
def test_what_is_found(outcomes: list[dict[str, Outcome]], name: str) -> None:
    first, second = (outcome[name] for outcome in outcomes)
    assert str(first.report) == str(second.report), "the report must be the same on every rank"
    assert first.left_a_trace == second.left_a_trace == []
    problems = first.report.problems
    assert len(problems) == len(CASES[name].expected), problems
    for problem, (severity, where, text) in zip(problems, CASES[name].expected, strict=True):
        assert problem.severity == severity, problem
        assert re.fullmatch(where, problem.where), problem
        assert re.search(text, problem.text), problem


@pytest.mark.parametrize("name", ["sound", "sound, tied"])
def test_loss_and_norm_are_those_of_one_process(outcomes: list[dict[str, Outcome]], name: str) -> None:
    """A tied weight, of which each stage has a part of the gradient, counts once."""
    case, report = CASES[name], outcomes[0][name].report
    plain = Plain(case.layers(), case.loss)
    loss = plain(*case.data())
    loss.backward()
    norm = torch.stack([parameter.grad.norm() for parameter in plain.parameters() if parameter.grad is not None]).norm()
    assert report.loss == pytest.approx(float(loss.detach()), rel=1e-5)
    assert report.gradient_norm == pytest.approx(float(norm), rel=1e-5)


def test_what_the_rows_say(outcomes: list[dict[str, Outcome]]) -> None:
    ids, *rows = outcomes[1]["sound, tied"].report.rows
    assert [row.stage_id for row in (ids, *rows)] == [0, 0, 1, 1] and [row.number for row in rows] == [1, 2, 3]
    assert (ids.name, ids.trainable, ids.frozen) == ("Embedding", VOCABULARY * WIDTH, 0)
    assert [str(value) for value in ids.inputs + ids.outputs] == ["int64[3, 4]", "float32[3, 4, 16]*"]
    assert rows[0].inputs == rows[0].outputs == ids.outputs and rows[0].seconds > 0
    assert [row.frozen for row in outcomes[0]["frozen stage"].report.rows] == [WIDTH * (WIDTH + 1), 0]
    (last,) = outcomes[0]["a layer raises"].report.rows[1:]
    assert last.outputs == () and str(last.inputs[0]) == "float32[3, 16]*"


def noise_and_statistics() -> Outcome:
    """Of layers that draw random numbers and change buffers, as `checked`."""
    CASES["noise"] = Case(lambda: [spec(Looks), spec(Layer, 1)], data=lambda: (torch.tensor([1, 2, 3]), features()[1]))
    return checked("noise")


def test_random_numbers_and_buffers_are_as_before(worlds: dict[int, World]) -> None:
    for outcome in worlds[2].run(noise_and_statistics):
        assert outcome.report.problems == () and outcome.left_a_trace == []


def two_replicas() -> Report:
    from deepspeed.pipe import PipelineModule

    from avgpipe_ds.preflight import preflight

    module = PipelineModule([spec(Layer, 0), spec(*HEAD)], num_stages=2, loss_fn=nn.functional.cross_entropy)
    return preflight(module, classified((0, 1, 2) if torch.distributed.get_rank() < 2 else (0, 1, 9)))


def test_what_is_wrong_with_another_replica_is_told_to_all(worlds: dict[int, World]) -> None:
    reports = worlds[4].run(two_replicas)
    assert [len(report.rows) for report in reports] == [2] * 4 and len({str(report) for report in reports}) == 1
    assert [problem.text[:21] for problem in reports[0].problems] == ["labels from 9 to 9, b"]


def of_stages(num_stages: int, middle: type[nn.Module], num_layers: int) -> Report:
    """A check of layers of which one, the second, is of the class `middle`."""
    from deepspeed.pipe import PipelineModule

    from avgpipe_ds.preflight import preflight

    layers = [spec(middle if place == 1 else Layer, place) for place in range(num_layers)]
    module = PipelineModule(layers, num_stages=num_stages, loss_fn=nn.functional.mse_loss, partition_method="uniform")
    return preflight(module, None if 0 < module.stage_id < num_stages - 1 else features())


class Raising(Layer):
    def forward(self, x: Tensor) -> Tensor:
        raise ArithmeticError("layer in a bad mood")


class RaisingInBackward(Layer):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        x.register_hook(self.refuse)
        return x

    def refuse(self, gradient: Tensor) -> None:
        raise ArithmeticError("gradient in a bad mood")


@pytest.mark.parametrize(
    ("middle", "where", "text", "rows"),
    [
        (Raising, "stage {stage}, layer 1 (Raising)", "ArithmeticError: layer in a bad mood", 2),
        (RaisingInBackward, "stage {stage}", "the backward raised ArithmeticError: gradient in a bad mood", 3),
        (Detached, "stage {stage}, layer 1 (Detached)", "its output does not depend on its input", 3),
    ],
)
@pytest.mark.parametrize("num_stages", [1, 3])
def test_any_number_of_stages(
    worlds: dict[int, World], num_stages: int, middle: type[nn.Module], where: str, text: str, rows: int
) -> None:
    """Nobody waits for the stage that can't go on, and what follows from its problem is not reported."""
    reports = worlds[num_stages].run(of_stages, num_stages, middle, 3)
    assert len({str(report) for report in reports}) == 1
    (problem,) = reports[0].problems
    assert problem.where == where.format(stage=1 if num_stages == 3 else 0) and problem.text.startswith(text)
    assert len(reports[0].rows) == rows


class Dying(Layer):
    def forward(self, x: Tensor) -> Tensor:
        os._exit(3)


def test_a_rank_that_dies_leaves_nobody_waiting() -> None:
    world = World(2)
    with pytest.raises(CaseFailed) as failed:
        world.run(of_stages, 2, Dying, 2, timeout_s=60)
    assert failed.value.errors[1] == "the process died"
    assert "PeerLost: rank 1 (stage 1) is gone" in failed.value.errors[0]


CONFIGS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "zero1": {"zero_optimization": {"stage": 1}},
    "bf16": {"bf16": {"enabled": True}},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
}


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("num_pipelines", [1, 2])
def test_training_after_a_check_is_the_same_bit_for_bit(worlds: dict[int, World], num_pipelines: int, config: str) -> None:
    task = HalfPrecisionInputs(dropout=0.1) if config == "bf16" else Task(dropout=0.1)
    options = {"activation_checkpoint_interval": 1} if config == "fp32" else {}
    clipping = 0.5 if config != "zero1" else 0.0
    run = Run(task=task, optimizer="adamw", clipping=clipping, config=CONFIGS[config], module_options=options)
    runs = [replace(run, avgpipe={"num_pipelines": num_pipelines, "preflight": checks}) for checks in (True, False)]
    with_check, without = (whole(worlds[2].run(train, one)) for one in runs)
    assert_same_history(with_check, without, tolerance=0.0)


def profile_first(engine: Any, data: Any) -> None:
    """Profile without keeping anything, before the first iteration."""
    if engine.iteration == 0:
        engine.profile(data, iterations=1, keep=False)


def test_a_check_comes_before_a_profile_that_leaves_no_trace(worlds: dict[int, World]) -> None:
    runs = [Run(task=Task(dropout=0.1), avgpipe={"num_pipelines": 2, "preflight": checks}) for checks in (True, False)]
    with_check, without = (whole(worlds[2].run(train, run, profile_first)) for run in runs)
    assert_same_history(with_check, without, tolerance=0.0)


def detached_engine() -> tuple[list[str], bool, str]:
    """What the first call raises, whether a second one trains, and what an iterator without data gives."""
    import avgpipe_ds
    from avgpipe_ds.preflight import PreflightError

    def engine() -> Any:
        from deepspeed.pipe import PipelineModule

        layers = [spec(Layer, 0), spec(Detached, 1)]
        module = PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss, partition_method="uniform")
        return avgpipe_ds.initialize(
            model=module,
            optimizer=OPTIMIZERS["sgd"],
            config=Run(avgpipe={"num_pipelines": 2, "preflight": True}).deepspeed_config(),
        )[0]

    first, data = engine(), Task().data()
    without_data = ""
    try:
        first.train_batch(iter(()))
    except avgpipe_ds.DataExhausted as error:
        without_data = str(error)
    found: list[str] = []
    try:
        first.train_batch(data)
    except PreflightError as error:
        found = [str(problem) for problem in error.report.problems]
    trains = bool(torch.isfinite(first.train_batch(data)))
    first.close()
    return found, trains, without_data


def test_errors_are_raised_on_every_rank_and_leave_the_engine_usable(worlds: dict[int, World]) -> None:
    for (problem,), trains, without_data in worlds[2].run(detached_engine):
        assert problem.startswith("stage 1, layer 1 (Detached): its output does not depend on its input")
        assert trains and "the data iterator is empty" in without_data
