"""What every contender trains: the same model, the same samples, the same optimizer."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bench.layers import EmulatedChunk, Times, TransformerChunk

__all__ = ["Samples", "Workload"]

Samples = tuple[Tensor, Tensor]
"""Inputs and labels, both `[samples, length, width]`."""

_POOL = 8  # different batches; they come round again, so that making them costs the measurement nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model of 2 K equal chunks, and what it is trained on.

    Two chunks for each of the K accelerators, so that pipelines with two stages on an accelerator and those with one train the
    same model.

    Attributes:
        mode: "emulated" or "real".
        num_stages: K, the accelerators.
        batch: B, samples that one model trains on per optimizer step.
        length, width: of a sample, `[length, width]`.
        times: of one accelerator's share of the model, in emulated mode.
        layers_per_chunk: transformer layers, in real mode.
        clipping: gradient clipping by the norm over the whole model, 0 for none.
        optimizer: "adam", or "sgd", whose steps, unlike Adam's, depend on the scale of the gradients.
        learning_rate: of the optimizer.
    """

    mode: Literal["emulated", "real"]
    num_stages: int
    batch: int
    length: int
    width: int
    times: Times
    layers_per_chunk: int
    clipping: float
    optimizer: Literal["adam", "sgd"] = "adam"
    learning_rate: float = 1e-4

    @property
    def num_chunks(self) -> int:
        """2 K."""
        return 2 * self.num_stages

    def plan_of_chunk(self, index: int) -> tuple[type[nn.Module], dict[str, Any]]:
        """Class and arguments of a chunk, 0 .. 2 K - 1; for those who build it themselves."""
        if self.mode == "emulated":
            return EmulatedChunk, {"seed": index, "width": self.width, "times": self.times.part(0.5)}
        return TransformerChunk, {"seed": index, "width": self.width, "num_layers": self.layers_per_chunk}

    def chunk(self, index: int) -> nn.Module:
        """Build a chunk; its weights depend on nothing but its index."""
        cls, arguments = self.plan_of_chunk(index)
        return cls(**arguments)

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer of whoever trains these parameters."""
        make: Callable[..., torch.optim.Optimizer] = torch.optim.Adam if self.optimizer == "adam" else torch.optim.SGD
        return make(parameters, lr=self.learning_rate)

    def batches(self, *, replica: int = 0, num_replicas: int = 1) -> Iterator[Samples]:
        """Endless batches, or the shares of them that one of several replicas trains; new tensors every time, as of a loader."""
        generator = torch.Generator().manual_seed(0)
        shape = (self.batch, self.length, self.width)
        pool = [(torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)) for _ in range(_POOL)]
        shares = [tuple(tensor.chunk(num_replicas)[replica] for tensor in samples) for samples in pool]
        while True:
            for inputs, labels in shares:
                yield inputs.clone(), labels.clone()

    def micro_batches(self, num_micro_batches: int, *, replica: int = 0, num_replicas: int = 1) -> Iterator[Samples]:
        """The same batches in slices, each in tensors of its own."""
        for inputs, labels in self.batches(replica=replica, num_replicas=num_replicas):
            for x, y in zip(inputs.chunk(num_micro_batches), labels.chunk(num_micro_batches), strict=True):
                yield x.clone(), y.clone()
