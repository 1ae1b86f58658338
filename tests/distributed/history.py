"""What training leaves behind after every iteration, of our engine and of one process, in the same form."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.distributed.models import Run, merged, weights_of

State = dict[str, Tensor]


@dataclass(frozen=True)
class Snapshot:
    """The state after one iteration: of one stage, or, merged, of the whole model.

    Attributes:
        loss: what `train_batch` returned.
        norm: of pipeline 0's gradients before clipping; None if nothing was clipped.
        gradients: by pipeline, as the optimizer got them; an empty list when it steps master weights of its own.
        weights: by pipeline.
        reference: z; with one pipeline its weights.
    """

    loss: float
    norm: float | None
    gradients: list[State]
    weights: list[State]
    reference: State


def train(run: Run, before: Callable[[Any, Any], None] = lambda engine, data: None) -> list[Snapshot]:
    """This rank's shard of what our engine makes of the run; replica r trains on the data of seed 1 + r.

    `before` is called with engine and data before each iteration.
    """
    engine = run.engine()
    own_masters = engine.optimizer is not engine.basic_optimizer
    seen: dict[int, State] = {}
    heard: set[int] = set()
    data = run.task.data(1 + engine.grid.get_data_parallel_rank())
    history = []
    for _ in range(run.iterations):
        before(engine, data)
        for pipeline in engine.pipelines[len(heard) :]:  # there may be more than before
            heard.add(pipeline.pipeline_id)
            pipeline.engine.basic_optimizer.register_step_pre_hook(
                lambda *_, i=pipeline.pipeline_id, module=pipeline.module: seen.update({i: gradients_of(module)})
            )
        loss = float(engine.train_batch(data))
        weights = [weights_of(pipeline.module) for pipeline in engine.pipelines]
        gradients = [] if own_masters else [seen[i] for i in sorted(seen)]
        norm = engine.get_global_grad_norm()
        reference = engine.reference_state_dict()
        history.append(Snapshot(loss, None if norm is None else float(norm), gradients, weights, reference))
    engine.close()
    return history


def gradients_of(module: Any) -> State:
    """Copies of the gradients that are there, by name, as `weights_of`."""
    named = [(name, p.grad) for name, p in module.named_parameters() if name != "nothing_to_train"]
    return {name: gradient.detach().clone() for name, gradient in named if gradient is not None}


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


def assert_same_history(ours: list[Snapshot], expected: list[Snapshot], tolerance: float = 1e-6) -> None:
    """Losses, norms, gradients, weights and reference agree at every iteration; `tolerance` is relative to a tensor's norm."""
    assert len(ours) == len(expected)
    for iteration, (mine, theirs) in enumerate(zip(ours, expected, strict=True)):
        where = f"iteration {iteration}"
        assert_close(mine.loss, theirs.loss, tolerance, f"{where}: loss")
        if theirs.norm is not None:
            assert mine.norm is not None, f"{where}: no gradient norm"
            assert_close(mine.norm, theirs.norm, tolerance, f"{where}: gradient norm")
        for i, (my_gradients, their_gradients) in enumerate(zip(mine.gradients, theirs.gradients, strict=bool(mine.gradients))):
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
