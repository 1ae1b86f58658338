"""What the benchmark computes: real transformer layers, or emulated accelerators.

An emulated accelerator sleeps, so that many of them fit on few cores. Where it sleeps matters: zero-bubble schedules compute the
gradient of a stage's input first and those of its weights later, and torch finds out which part of the graph is which by
following it from the inputs and from the parameters. So the two times of a backward sit on two nodes: one on the path of the
activations, one between a weight and its use. An ordinary backward passes through both.
"""

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Accelerator", "EmulatedChunk", "Times", "TransformerChunk", "mean_squared_error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds that computation takes for a micro-batch of b samples: `fixed_s + b * per_sample` for each of its three passes.

    The fixed part is what launching kernels costs and what small micro-batches leave of an accelerator unused; it makes slicing a
    batch finer dearer.

    Attributes:
        fixed_s: of every pass, however small the micro-batch.
        forward_s: per sample.
        input_gradient_s: per sample; the part of the backward that the stage before waits for.
        weight_gradient_s: per sample; the part of the backward that can wait.
    """

    fixed_s: float
    forward_s: float
    input_gradient_s: float
    weight_gradient_s: float

    def part(self, share: float) -> "Times":
        """Times of a part of what is computed, such as one of the chunks on an accelerator."""
        return Times(
            fixed_s=share * self.fixed_s,
            forward_s=share * self.forward_s,
            input_gradient_s=share * self.input_gradient_s,
            weight_gradient_s=share * self.weight_gradient_s,
        )

    def total_s(self, num_samples: float) -> float:
        """Forward and whole backward of one micro-batch."""
        return 3 * self.fixed_s + num_samples * (self.forward_s + self.input_gradient_s + self.weight_gradient_s)


class Accelerator:
    """An emulated one: held for a set wall time, without using the CPU."""

    def __init__(self) -> None:
        """Nothing is late yet."""
        self._late_s = 0.0

    def hold(self, seconds: float) -> None:
        """Return after `seconds`. What a timer is late, the next one is set earlier: an accelerator has no timers."""
        deadline = time.perf_counter() + seconds - self._late_s
        time.sleep(max(0.0, deadline - time.perf_counter()))
        self._late_s = time.perf_counter() - deadline


_accelerator = Accelerator()  # of this process


class _HoldActivation(torch.autograd.Function):
    """Takes a set wall time in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        _accelerator.hold(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        _accelerator.hold(ctx.backward_s)
        return gradients[0], None, None


class _HoldWeight(torch.autograd.Function):
    """Takes a set wall time in backward. A view, so that what autograd keeps is the weight itself and not a copy."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        _accelerator.hold(ctx.backward_s)
        return gradients[0], None


class EmulatedChunk(nn.Module):
    """A part of an accelerator's work that takes a set time for each sample.

    The linear layer is real, so weights, gradients and messages are, too; `width` sets the size of a message.
    """

    def __init__(self, *, seed: int, width: int, times: Times) -> None:
        """`seed` decides the weights, whoever builds the chunk and wherever."""
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.linear = nn.Linear(width, width)
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, length, width]` to the same."""
        times, num_samples = self.times, x.shape[0]
        weight_s = times.fixed_s + num_samples * times.weight_gradient_s
        weight: Tensor = _HoldWeight.apply(self.linear.weight, weight_s)  # type: ignore[no-untyped-call]
        forward_s = times.fixed_s + num_samples * times.forward_s
        backward_s = times.fixed_s + num_samples * times.input_gradient_s
        # Behind the linear layer, not before it: the input of the first chunk needs no gradient, so a node there would never run.
        output = nn.functional.linear(x, weight, self.linear.bias)
        held: Tensor = _HoldActivation.apply(output, forward_s, backward_s)  # type: ignore[no-untyped-call]
        return held


class TransformerChunk(nn.Module):
    """Some transformer encoder layers."""

    def __init__(self, *, seed: int, width: int, num_layers: int) -> None:
        """`num_layers` layers of `width` with a feed-forward of four times that; `seed` decides the weights."""
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.layers = nn.ModuleList(
                nn.TransformerEncoderLayer(width, max(1, width // 64), 4 * width, dropout=0.0, batch_first=True)
                for _ in range(num_layers)
            )

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, length, width]` to the same."""
        for layer in self.layers:
            x = layer(x)
        return x


def mean_squared_error(outputs: Tensor, labels: Tensor) -> Tensor:
    """A scalar: the mean over samples, so that the loss of a batch is the mean of those of its micro-batches."""
    return nn.functional.mse_loss(outputs, labels)
