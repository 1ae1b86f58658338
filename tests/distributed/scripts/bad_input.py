"""A user's script under the `deepspeed` launcher in which much goes wrong. Prints one line per case and rank: what was raised.

Each case gets a new engine in the same process. The last one is not caught.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

from deepspeed.pipe import LayerSpec, PipelineModule
from torch import Tensor, nn

import avgpipe_ds
from tests.distributed.models import WIDTH, Run, Task

RANK = int(os.environ["RANK"])
PER_ITERATION = 8


class Moody(nn.Module):
    """Raises, or returns what can't be sent, from its fifth training forward on."""

    def __init__(self, mood: str) -> None:
        super().__init__()
        self.mood, self.forwards = mood, 0
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        self.forwards += 1
        if self.forwards < 5:
            return self.linear(x)
        if self.mood == "raise":
            raise ArithmeticError("layer in a bad mood")
        return {"hidden": x}


def engine_of(
    layers: list[Any] | None = None, *, stages: int = 2, loss: Any = nn.functional.mse_loss, frozen: bool = False, **config: Any
) -> Any:
    specs = layers or [LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(2)]
    module = PipelineModule(specs, num_stages=stages, loss_fn=loss, partition_method="uniform")
    for parameter in module.parameters():
        parameter.requires_grad_(not frozen)
    settings = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": 4,
        "steps_per_print": 1000,
        "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
        "avgpipe": {"num_pipelines": 2},
        **config,
    }
    return avgpipe_ds.initialize(model=module, config=settings)[0]


def train(engine: Any, data: Any = None, iterations: int = 2) -> None:
    data = Task().data() if data is None else data
    for _ in range(iterations):
        engine.train_batch(data)


def spoiled(place: int, change: Callable[[Any], Any], rank: int | None = None) -> Iterator[Any]:
    """Data in which the item at `place` is changed, on one rank or on all."""
    for number, item in enumerate(Task().data()):
        yield change(item) if number == place and rank in (None, RANK) else item


def no_item(item: Any) -> Any:
    raise OSError("disk on fire")


def finite(count: int) -> Iterator[Any]:
    return itertools.islice(Task().data(), count)


def each(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs - labels).square().mean(-1)


LINEAR = LayerSpec(nn.Linear, WIDTH, WIDTH)

CASES: dict[str, Callable[[], None]] = {
    "layer-last": lambda: train(engine_of([LINEAR, LayerSpec(Moody, "raise")])),
    "layer-first": lambda: train(engine_of([LayerSpec(Moody, "raise"), LINEAR])),
    "output": lambda: train(engine_of([LayerSpec(Moody, "dict"), LINEAR])),
    "nan": lambda: train(engine_of(), spoiled(PER_ITERATION + 6, lambda item: (item[0], item[1] * float("nan")))),
    "empty": lambda: train(engine_of(), iter(())),
    "middle": lambda: train(engine_of(), finite(PER_ITERATION + 5)),
    "loader": lambda: train(engine_of(), spoiled(3, no_item, rank=0)),
    "loader-ahead": lambda: train(engine_of(), spoiled(PER_ITERATION + 3, no_item, rank=1)),
    "shorter-here": lambda: train(engine_of(), finite(PER_ITERATION * (2 - RANK))),
    "sizes": lambda: train(engine_of(), spoiled(1, lambda item: (item[0], item[1][:2]))),
    "loss": lambda: train(engine_of(loss=each)),
    "frozen": lambda: train(engine_of(frozen=True)),
    "no-iterator": lambda: engine_of().train_batch(),
    "list": lambda: engine_of().train_batch(list(finite(PER_ITERATION))),
    "zero2": lambda: train(engine_of(zero_optimization={"stage": 2})),
    "zero3": lambda: train(engine_of(zero_optimization={"stage": 3})),
    "key": lambda: train(engine_of(avgpipe={"num_pipeline": 2})),
    "range": lambda: train(engine_of(avgpipe={"num_pipelines": 0, "averaging": {"alpha": 1.5}, "schedule": {"advance": -1}})),
    "partition": lambda: train(engine_of(avgpipe={"num_pipelines": 2, "partition": [0, 2]})),
    "stages": lambda: train(engine_of([LINEAR] * 3, stages=3)),
}


def say(name: str, text: str) -> None:
    print(f"\nCASE {name} RANK {RANK} " + text.replace("\n", " "), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int)
    parser.add_argument("how")
    how = parser.parse_args().how
    avgpipe_ds.init_distributed(dist_backend="gloo")
    if how == "cases":
        for name, case in CASES.items():
            try:
                case()
                say(name, "nothing was raised")
            except (Exception, StopIteration) as error:  # noqa: BLE001
                say(name, f"{type(error).__name__}: {error}")
        train(engine_of())
        say("afterwards", "trained")
        CASES["layer-last"]()
    engine = Run(task=Task(dropout=0.1), avgpipe={"num_pipelines": 2}).engine()
    train(engine)
    if how == "in-flight":
        return
    if how == "kill" and RANK == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    train(engine, iterations=1000)


if __name__ == "__main__":
    main()
