"""What training has to come to, in plain torch on one process: one model, and N models after the formulas of the method."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice
from typing import Any

from tests.distributed.history import Snapshot, State, gradients_of
from tests.distributed.models import OPTIMIZERS, Plain, Run, Task, weights_of


class SingleProcess:
    """One model on one process, in plain torch.

    Args:
        task: model and data.
        optimizer: key of `OPTIMIZERS`.
        clipping: largest gradient norm, 0 for none.
    """

    def __init__(self, task: Task, optimizer: str, clipping: float = 0.0) -> None:
        self.model: Plain = task.plain()
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = OPTIMIZERS[optimizer](self.trained)
        self.clipping = clipping
        self.norm: float | None = None
        self.gradients: State = {}

    def step(self, micro_batches: list[tuple[Any, Any]]) -> float:
        """Train one batch; returns its loss, the mean over micro-batches."""
        losses = []
        for inputs, labels in micro_batches:
            loss = self.model(inputs, labels)
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


def train_on_one_process(run: Run, num_replicas: int = 1) -> list[Snapshot]:
    """What one pipeline has to come to, on the data of all replicas together."""
    single = SingleProcess(run.task, run.optimizer, run.clipping)
    streams = [run.task.data(1 + replica) for replica in range(num_replicas)]
    history = []
    for _ in range(run.iterations):
        loss = single.step(_take(streams, run.num_micro_batches))
        weights = weights_of(single.model)
        history.append(Snapshot(loss, single.norm, [single.gradients], [weights], weights))
    return history


class Method:
    """N models w_i and their reference z on one process.

    Each iteration every model trains its own batch, which gives its local update u_i; then w_i and z follow from the formulas,
    all of whose right-hand sides use the w_i and the z of the previous iteration. Buffers are not pulled; the reference has their
    mean.
    """

    def __init__(self, run: Run, num_replicas: int = 1) -> None:
        assert run.avgpipe is not None
        num_pipelines, averaging = run.avgpipe["num_pipelines"], run.avgpipe.get("averaging", {})
        self.num_micro_batches = run.num_micro_batches
        self.models = [SingleProcess(run.task, run.optimizer, run.clipping) for _ in range(num_pipelines)]
        self.streams = [run.task.data(1 + replica) for replica in range(num_replicas)]
        self.rule = averaging.get("rule", "avgpipe")
        self.alpha = averaging.get("alpha", 1 / num_pipelines)
        self.mu = averaging.get("momentum", 0.0)
        self.outer_lr = averaging.get("outer_lr", 1.0)
        self.outer_momentum = averaging.get("outer_momentum", 0.0)
        self.z = weights_of(self.models[0].model)
        self.z_previous = dict(self.z)
        self.v = {name: z * 0 for name, z in self.z.items()}

    def iterate(self) -> Snapshot:
        """One iteration."""
        w_before = [weights_of(single.model) for single in self.models]
        losses = [single.step(_take(self.streams, self.num_micro_batches)) for single in self.models]
        w_after = [weights_of(single.model) for single in self.models]
        z_new: State = {}
        buffers = dict(self.models[0].model.named_buffers())
        for name, z in self.z.items():
            if name in buffers:
                values = [after[name] for after in w_after]
                z_new[name] = sum(values) / len(values) if z.is_floating_point() else values[0]
                continue
            w = [weights[name] for weights in w_before]
            u = [after[name] - before[name] for after, before in zip(w_after, w_before, strict=True)]
            if self.rule == "avgpipe":
                w_new = [(1 - self.alpha) * (w_i + u_i) + self.alpha * z for w_i, u_i in zip(w, u, strict=True)]
                mean = sum(u) / len(u)
                self.v[name] = self.outer_momentum * self.v[name] + mean
                z_new[name] = z + self.outer_lr * (mean + self.outer_momentum * self.v[name])
            else:
                c = [self.alpha * (w_i - z) for w_i in w]
                w_new = [w_i + u_i - c_i for w_i, u_i, c_i in zip(w, u, c, strict=True)]
                z_new[name] = z + sum(c) + self.mu * (z - self.z_previous[name])
            for single, value in zip(self.models, w_new, strict=True):
                single.model.state_dict()[name].copy_(value)
        self.z_previous, self.z = self.z, z_new
        gradients = [single.gradients for single in self.models]
        weights = [weights_of(single.model) for single in self.models]
        return Snapshot(sum(losses) / len(losses), self.models[0].norm, gradients, weights, self.z)


def train_by_the_formulas(run: Run, num_replicas: int = 1) -> list[Snapshot]:
    """What N pipelines have to come to."""
    method = Method(run, num_replicas)
    return [method.iterate() for _ in range(run.iterations)]


def _take(streams: list[Iterator[Any]], num_micro_batches: int) -> list[Any]:
    """The next batch: micro-batches of every replica."""
    return [micro_batch for stream in streams for micro_batch in islice(stream, num_micro_batches)]
