"""What training leaves behind after every iteration, of our engine and of one process, in the same form."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from tests.distributed.models import OPTIMIZERS, Plain, Run, Task, merged, weights_of

State = dict[str, Tensor]


@dataclass(frozen=True)
class Snapshot:
    """The state after one iteration: of one stage, or, merged, of the whole model.

    Attributes:
        loss: what `train_batch` returned.
        norm: of pipeline 0's gradients before clipping; None if nothing was clipped.
        gradients: by pipeline, as the optimizer got them; empty when it steps master weights of its own.
        weights: by pipeline.
        reference: z; with one pipeline its weights.
    """

    loss: float
    norm: float | None
    gradients: list[State]
    weights: list[State]
    reference: State


def train(run: Run) -> list[Snapshot]:
    """This rank's shard of what our engine makes of the run; replica r trains on the data of seed 1 + r."""
    engine = run.engine()
    seen: dict[int, State] = {}
    for pipeline in engine.pipelines:
        pipeline.engine.basic_optimizer.register_step_pre_hook(
            lambda *_, pipeline=pipeline: seen.update({pipeline.pipeline_id: gradients_of(pipeline.module)})
        )
    data = run.task.data(1 + engine.grid.get_data_parallel_rank())
    history = []
    for _ in range(run.iterations):
        loss = float(engine.train_batch(data))
        weights = [weights_of(pipeline.module) for pipeline in engine.pipelines]
        gradients = [seen[i] for i in range(engine.num_pipelines)]
        history.append(Snapshot(loss, engine.get_global_grad_norm(), gradients, weights, engine.reference_state_dict()))
    engine.close()
    return history


def gradients_of(module: Any) -> State:
    """Copies of the gradients that are there, by name."""
    return {name: p.grad.detach().clone() for name, p in module.named_parameters() if p.grad is not None}


def whole(shards: Sequence[list[Snapshot]]) -> list[Snapshot]:
    """The shards of all ranks as histories of the whole model; all ranks must report the same losses and norms."""
    history = []
    for parts in zip(*shards, strict=True):
        assert len({part.loss for part in parts}) == 1, f"losses differ: {[part.loss for part in parts]}"
        assert len({part.norm for part in parts}) == 1, f"gradient norms differ: {[part.norm for part in parts]}"
        gradients = [merged(list(states)) for states in zip(*(part.gradients for part in parts), strict=True)]
        weights = [merged(list(states)) for states in zip(*(part.weights for part in parts), strict=True)]
        history.append(Snapshot(parts[0].loss, parts[0].norm, gradients, weights, merged([part.reference for part in parts])))
    return history


class SingleProcess:
    """One model on one process, in plain torch.

    Args:
        task: model and data.
        optimizer: key of `OPTIMIZERS`.
        clipping: largest gradient norm, 0 for none.
        dtype: to compute in.
    """

    def __init__(self, task: Task, optimizer: str, clipping: float = 0.0, dtype: torch.dtype = torch.float32) -> None:
        self.model: Plain = task.plain().to(dtype)
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = OPTIMIZERS[optimizer](self.trained)
        self.clipping = clipping
        self.dtype = dtype
        self.norm: float | None = None
        self.gradients: State = {}

    def step(self, micro_batches: list[tuple[Any, Any]]) -> float:
        """Train one batch; returns its loss, the mean over micro-batches."""
        losses = []
        for inputs, labels in micro_batches:
            loss = self.model(self._cast(inputs), self._cast(labels))
            (loss / len(micro_batches)).backward()
            losses.append(float(loss.detach()))
        if self.clipping:
            gradients = [p.grad for p in self.trained if p.grad is not None]
            self.norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients))
            for gradient in gradients:
                gradient.mul_(min(1.0, self.clipping / (self.norm + 1e-6)))
        self.gradients = gradients_of(self.model)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return sum(losses) / len(losses)

    def _cast(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(self._cast(v) for v in value)
        return value.to(self.dtype, copy=True) if isinstance(value, Tensor) and value.is_floating_point() else value


def train_on_one_process(run: Run, num_replicas: int = 1) -> list[Snapshot]:
    """What one pipeline has to come to, on the data of all replicas together."""
    single = SingleProcess(run.task, run.optimizer, run.clipping)
    streams = [run.task.data(1 + replica) for replica in range(num_replicas)]
    history = []
    for _ in range(run.iterations):
        loss = single.step([batch for stream in streams for batch in islice(stream, run.num_micro_batches)])
        weights = weights_of(single.model)
        history.append(Snapshot(loss, single.norm, [single.gradients], [weights], weights))
    return history


def assert_same_history(ours: list[Snapshot], expected: list[Snapshot], tolerance: float = 1e-6) -> None:
    """Losses, norms, gradients, weights and reference agree at every iteration; `tolerance` is relative to a tensor's norm."""
    assert len(ours) == len(expected)
    for iteration, (mine, theirs) in enumerate(zip(ours, expected, strict=True)):
        where = f"iteration {iteration}"
        assert_close(mine.loss, theirs.loss, tolerance, f"{where}: loss")
        if theirs.norm is not None:
            assert mine.norm is not None, f"{where}: no gradient norm"
            assert_close(mine.norm, theirs.norm, tolerance, f"{where}: gradient norm")
        for i, (my_gradients, their_gradients) in enumerate(zip(mine.gradients, theirs.gradients, strict=True)):
            assert_close_states(my_gradients, their_gradients, tolerance, f"{where}: gradient of pipeline {i}")
        for i, (my_weights, their_weights) in enumerate(zip(mine.weights, theirs.weights, strict=True)):
            assert_close_states(my_weights, their_weights, tolerance, f"{where}: weights of pipeline {i}")
        assert_close_states(mine.reference, theirs.reference, tolerance, f"{where}: reference")


def assert_close_states(mine: State, theirs: State, tolerance: float, where: str) -> None:
    """Same names, and tensors that differ by at most `tolerance` times their norm."""
    assert mine.keys() == theirs.keys(), f"{where}: {sorted(mine.keys() ^ theirs.keys())} are only on one side"
    for name in mine:
        assert_close(mine[name], theirs[name], tolerance, f"{where}, {name}")


def assert_close(mine: Tensor | float, theirs: Tensor | float, tolerance: float, where: str) -> None:
    """The difference is at most `tolerance` times the norm of `theirs`."""
    a, b = torch.as_tensor(mine).double(), torch.as_tensor(theirs).double()
    assert a.shape == b.shape, f"{where}: shapes {tuple(a.shape)} and {tuple(b.shape)}"
    error, size = float((a - b).norm()), float(b.norm())
    assert error <= tolerance * size, f"{where}: off by {error:.3g}, {error / size if size else math.inf:.3g} of its norm"
