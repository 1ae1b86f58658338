"""Layers and links that take their time, at random, from generators that training knows nothing of."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.distributed.models import WIDTH, Layer, Task

_delays = random.Random()

FORWARDS: list[int] = []
"""`id` of each `ShakyLayer` in the order in which this rank ran their training forwards."""


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, longest_s: float) -> Tensor:
        ctx.longest_s = longest_s
        time.sleep(_delays.random() * longest_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(_delays.random() * ctx.longest_s)
        return gradient, None


class ShakyLayer(Layer):
    """`Layer` whose forward and backward hold the stage for up to `longest_s`."""

    def __init__(self, seed: int, dropout: float = 0.0, longest_s: float = 0.0) -> None:
        super().__init__(seed, dropout)
        self.longest_s = longest_s

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            FORWARDS.append(id(self))
        return _Sleep.apply(super().forward(x.to(self.linear.weight.dtype)), self.longest_s)


@dataclass(frozen=True)
class ShakyTask(Task):
    """`Task` of layers that take up to `longest_s`; with `buffered`, each followed by one with buffers."""

    longest_s: float = 0.004
    buffered: bool = False

    def layers(self) -> list[Any]:
        from deepspeed.pipe import LayerSpec

        pairs = [
            (LayerSpec(ShakyLayer, seed, self.dropout, self.longest_s), LayerSpec(Buffered)) for seed in range(self.num_layers)
        ]
        return [spec for pair in pairs for spec in pair[: 2 if self.buffered else 1]]


class Buffered(nn.Module):
    """Counts and averages what it sees into buffers, as BatchNorm does, and normalises with them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, momentum=0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * self.norm(x).to(x.dtype)


@contextmanager
def shaky_links(longest_s: float) -> Iterator[None]:
    """Inside the block every message of this rank is late by up to `longest_s`, on its way out and on its way in."""
    from avgpipe_ds.transport.gloo import GlooTransport

    def late(function: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            time.sleep(_delays.random() * longest_s)
            return function(*args, **kwargs)

        return wrapped

    send, receive = GlooTransport.send, GlooTransport._receive_tensors
    GlooTransport.send, GlooTransport._receive_tensors = late(send), late(receive)  # type: ignore[method-assign]
    try:
        yield
    finally:
        GlooTransport.send, GlooTransport._receive_tensors = send, receive  # type: ignore[method-assign]


@contextmanager
def shaky_executor() -> Iterator[None]:
    """Inside the block this rank's executor picks any stream that can go on, not the best."""
    from avgpipe_ds.execution import pipeline

    best = pipeline.priority
    pipeline.priority = lambda **place: (_delays.randrange(1000),)  # type: ignore[assignment]
    try:
        yield
    finally:
        pipeline.priority = best
