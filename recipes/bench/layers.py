"""What the benchmark computes: real transformer layers, or emulated accelerators."""

import time
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["EmulatedStage", "TransformerStage", "squared_mean"]


class _Hold(torch.autograd.Function):
    """Holds the stage for a set wall time in forward and backward, without using the CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        time.sleep(ctx.backward_s)
        return gradients[0].clone(), None, None


class EmulatedStage(nn.Module):
    """An accelerator that takes a set time per micro-batch, so that many of them fit on few cores.

    The linear layer is real, so weights, gradients and messages are, too; `width` sets the size of a message.
    """

    def __init__(self, width: int, forward_s: float, backward_s: float) -> None:
        """Times in seconds per micro-batch."""
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.forward_s, self.backward_s = forward_s, backward_s

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, length, width]` to the same."""
        return _Hold.apply(self.linear(x), self.forward_s, self.backward_s)  # type: ignore[no-any-return]


class TransformerStage(nn.Module):
    """Some transformer encoder layers."""

    def __init__(self, width: int, num_layers: int) -> None:
        """`num_layers` layers of `width` with a feed-forward of four times that."""
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, max(1, width // 64), 4 * width, dropout=0.0, batch_first=True)
            for _ in range(num_layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, length, width]` to the same."""
        for layer in self.layers:
            x = layer(x)
        return x


def squared_mean(outputs: Tensor, labels: Tensor) -> Tensor:
    """A scalar to train on; the labels only have to be there."""
    return outputs.float().pow(2).mean() + 0.0 * labels.float().mean()
