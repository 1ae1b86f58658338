"""What users do by mistake, alone or on some ranks only: an error on every rank that says what to do, or the right result."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from avgpipe_ds.errors import AvgPipeError, ConfigError
from tests.distributed.models import Run, Task, weights_of
from tests.distributed.world import World

TWO = Run(avgpipe={"num_pipelines": 2}, task=Task(), num_micro_batches=2)


def failure(call: Callable[[], Any], *kinds: type[BaseException]) -> str:
    """The error that a call raises, which is one of these."""
    with pytest.raises(kinds) as caught:
        call()
    return str(caught.value)


def reused_buffers(run: Run) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """A loader that hands out the same two tensors again and again."""
    buffers: Any = None
    for item in run.task.data():
        if buffers is None:
            buffers = tuple(t.clone() for t in item)
        for buffer, value in zip(buffers, item, strict=True):
            buffer.copy_(value)
        yield buffers


def train_with_either_loader() -> bool:
    weights = []
    for data in (TWO.task.data(), reused_buffers(TWO)):
        engine = TWO.engine()
        for _ in range(3):
            engine.train_batch(data)
        weights.append([weights_of(pipeline.module) for pipeline in engine.pipelines])
        engine.close()
    return all(torch.equal(a[name], b[name]) for a, b in zip(*weights, strict=True) for name in a)


def test_a_loader_may_reuse_its_buffers(worlds: dict[int, World]) -> None:
    assert worlds[2].run(train_with_either_loader) == [True, True]


def train_with_groups(num_pipelines: int) -> list[bool]:
    """Whether weights move, for groups in every form that torch takes."""
    import avgpipe_ds

    moved = []
    for form in (
        lambda module: [{"params": (p for p in module.parameters()), "lr": 0.1}],
        lambda module: [{"params": p} for p in module.parameters()],
        lambda module: module.parameters(),
    ):
        module = TWO.task.pipeline(2)
        before = weights_of(module)
        config = Run(num_micro_batches=2, avgpipe={"num_pipelines": num_pipelines}).deepspeed_config()
        sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1)  # noqa: E731
        engine = avgpipe_ds.initialize(model=module, optimizer=sgd, model_parameters=form(module), config=config)[0]
        engine.train_batch(TWO.task.data())
        after = [weights_of(pipeline.module) for pipeline in engine.pipelines]
        moved.append(all(not torch.equal(weights[name], before[name]) for weights in after for name in before))
        engine.close()
    return moved


@pytest.mark.parametrize("num_pipelines", [1, 2])
def test_parameter_groups_in_every_form(worlds: dict[int, World], num_pipelines: int) -> None:
    assert worlds[2].run(train_with_groups, num_pipelines) == [[True] * 3] * 2


def rates_after_three_iterations() -> list[float]:
    import avgpipe_ds

    engine = avgpipe_ds.initialize(
        model=TWO.task.pipeline(2),
        optimizer=lambda p: torch.optim.Adam(p, lr=torch.tensor(1.0)),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
        config=TWO.deepspeed_config(),
    )[0]
    data = TWO.task.data()
    for _ in range(3):
        engine.train_batch(data)
    engine.close()
    return [float(pipeline.engine.basic_optimizer.param_groups[0]["lr"]) for pipeline in engine.pipelines]


def test_a_learning_rate_that_is_a_tensor_belongs_to_one_pipeline(worlds: dict[int, World]) -> None:
    assert worlds[2].run(rates_after_three_iterations) == [[0.125, 0.125]] * 2


def mistakes(folder: str) -> dict[str, str]:
    """Error texts on this rank; the engine goes on after each but the last two."""
    import torch.distributed as dist

    rank, errors = dist.get_rank(), {}
    engine, data = TWO.engine(), TWO.task.data()
    engine.train_batch(data)
    for name, wrong in {
        "loss on one rank only": {"compute_loss": rank == 0},
        "no micro-batch": {"num_micro_batches": 0},
        "unknown reduction": {"reduce_output": "sum"},
    }.items():
        errors[name] = failure(lambda wrong=wrong: engine.eval_batch(TWO.task.data(), **wrong), ValueError)
    engine.save_checkpoint(folder, tag="there")
    errors["unknown tag"] = failure(lambda: engine.load_checkpoint(folder, tag="elsewhere"), ValueError)
    mine = folder if rank == 0 else f"{folder}/on-another-machine"
    errors["folder of one machine"] = failure(lambda: engine.load_checkpoint(mine), ValueError)
    errors["weights of one machine"] = failure(lambda: engine.load_checkpoint(mine, load_module_only=True), ValueError)
    errors["tags"] = failure(lambda: engine.save_checkpoint(folder, tag=f"on-{rank}"), ValueError)
    engine.train_batch(data)
    dist.barrier()  # else the other rank might hear of the next failure within this call
    for pipeline in engine.pipelines:
        next(pipeline.module.parameters()).requires_grad_(False)
    errors["frozen later"] = failure(lambda: engine.train_batch(data), AvgPipeError)
    engine.close()
    errors["closed"] = failure(lambda: engine.train_batch(data), AvgPipeError)
    without = Run(avgpipe={"num_pipelines": 2}).deepspeed_config()

    def no_optimizer() -> Any:
        import avgpipe_ds

        return avgpipe_ds.initialize(model=TWO.task.pipeline(2), config=without)

    errors["no optimizer"] = failure(no_optimizer, ConfigError)

    def foreign(**wrong: Any) -> Any:
        import avgpipe_ds

        right = {"model": TWO.task.pipeline(2), "config": without, "optimizer": torch.optim.SGD}
        return avgpipe_ds.initialize(**{**right, **wrong})

    other = list(TWO.task.plain().parameters())
    outside = TWO.task.pipeline(2)
    for name, made in {
        "optimizer of another model": lambda given: torch.optim.SGD(other, lr=1e-3),
        "optimizer of the first model": lambda given: torch.optim.SGD(outside.parameters(), lr=1e-3),
        "callable without optimizer": lambda given: None,
    }.items():
        errors[name] = failure(lambda made=made: foreign(model=outside, optimizer=made), ConfigError)
    errors["optimizer by name"] = failure(lambda: foreign(optimizer="adam"), ConfigError)
    errors["groups without params"] = failure(
        lambda: foreign(optimizer=torch.optim.SGD, model_parameters=[{"p": 1}]), ConfigError
    )
    own = {**without, "avgpipe": {"num_pipelines": 2 + rank}}
    errors["other settings"] = failure(lambda: foreign(config=own), ConfigError)
    errors["bad settings on one rank"] = failure(
        lambda: foreign(config={**without, "avgpipe": {"num_pipelines": rank}}), ConfigError
    )
    errors["foreign optimizer"] = failure(lambda: foreign(optimizer=torch.optim.SGD(other, lr=1e-3)), ConfigError)
    errors["foreign parameters"] = failure(lambda: foreign(optimizer=torch.optim.SGD, model_parameters=other), ConfigError)
    return errors


EXPECTED = {
    "loss on one rank only": "called differently on different ranks.*compute_loss=False.*compute_loss=True",
    "no micro-batch": "num_micro_batches as an integer from 1",
    "unknown reduction": 'reduce_output "avg" or None',
    "unknown tag": "no checkpoint .*elsewhere",
    "folder of one machine": r"ranks \[1\] find no checkpoint",
    "frozen later": "frozen or unfrozen after initialize|failed: AvgPipeError",
    "closed": "closed|stopped earlier",
    "no optimizer": "need an optimizer",
    "foreign optimizer": "8 of the 8 parameters of the optimizer belong to another model",
    "optimizer of another model": "8 of the 8 parameters of the optimizer belong to another model",
    "optimizer of the first model": "4 of the 4 parameters of the optimizer belong to another model",
    "callable without optimizer": "must return a torch optimizer, it returned None",
    "optimizer by name": "must be a torch optimizer or a callable.*got 'adam'",
    "groups without params": "parameters or groups",
    "other settings": r'"avgpipe" is .*num_pipelines=2.* on rank 0, .*num_pipelines=3.* on rank 1',
    "bad settings on one rank": "num_pipelines",
    "weights of one machine": r"ranks \[1\] find no checkpoint",
    "tags": r"stage 0\) is in save_checkpoint with tag 'on-0'.*stage 1\) is in save_checkpoint with tag 'on-1'",
    "foreign parameters": "8 of the 8 parameters of model_parameters belong to another model",
}


def test_mistakes_are_named_on_every_rank(worlds: dict[int, World], tmp_path: Path) -> None:
    for errors in worlds[2].run(mistakes, str(tmp_path)):
        assert errors.keys() == EXPECTED.keys()
        for name, pattern in EXPECTED.items():
            assert re.search(pattern, errors[name], re.DOTALL), (name, errors[name])


def different_calls(folder: str, calls: dict[int, str]) -> tuple[str, str]:
    """What this rank is told when the ranks make these calls at the same time, and whether it can train on."""
    import torch.distributed as dist

    engine, data = TWO.engine(), TWO.task.data()
    engine.train_batch(data)
    make = {
        "train_batch": lambda: [engine.train_batch(data) for _ in range(3)],
        "eval_batch": lambda: engine.eval_batch(TWO.task.data()),
        "save_checkpoint": lambda: engine.save_checkpoint(folder),
        "load_checkpoint": lambda: engine.load_checkpoint(folder),
        "meet": lambda: engine.meet("something of their own"),
    }
    told = failure(make[calls[dist.get_rank()]], AvgPipeError, ValueError)
    try:
        engine.train_batch(data)
        afterwards = "trains on"
    except AvgPipeError as error:
        afterwards = str(error)
    engine.close()
    return told, afterwards


@pytest.mark.parametrize(
    ("calls", "trains_on"),
    [
        ({0: "train_batch", 1: "eval_batch"}, False),
        ({0: "eval_batch", 1: "train_batch"}, False),
        ({0: "load_checkpoint", 1: "train_batch"}, False),
        ({0: "train_batch", 1: "meet"}, False),
        ({0: "save_checkpoint", 1: "eval_batch"}, True),
        ({0: "meet", 1: "eval_batch"}, True),
    ],
    ids=lambda value: "-".join(value.values()) if isinstance(value, dict) else "",
)
def test_different_calls_at_the_same_time(
    worlds: dict[int, World], tmp_path: Path, calls: dict[int, str], trains_on: bool
) -> None:
    for told, afterwards in worlds[2].run(different_calls, str(tmp_path), calls):
        assert "every rank must make the same calls in the same order" in told
        for rank, name in calls.items():
            shown = "something of their own" if name == "meet" else name
            assert f"rank {rank} (stage {rank}) is in {shown}" in told
        assert (afterwards == "trains on") == trains_on
        assert trains_on or "this engine stopped earlier" in afterwards
