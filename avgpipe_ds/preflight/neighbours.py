"""What stages tell each other during a check: their outputs, the gradients of these, or that they can't go on.

A stage that found an error still answers whoever waits for it, so no rank ever waits in vain: who gets outputs answers once.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from avgpipe_ds.execution.mailbox import Mailbox
from avgpipe_ds.execution.tensors import as_tuple
from avgpipe_ds.transport.message import Message

__all__ = ["Flow", "Neighbours"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """What comes to a stage.

    Attributes:
        values: a tensor or a tuple of tensors; those that want a gradient require one.
        samples: of the micro-batch; None if nobody knows.
        trains_above: whether a stage before has something to train.

    """

    values: Any
    samples: int | None = None
    trains_above: bool = False


class Neighbours:
    """The stages of one data-parallel replica, over the host: messages are few and small.

    Args:
        mailbox: of CPU tensors.
        ranks: of the replica's stages, stage 0 first.
        stage_id: k.
        device: where the stage computes.

    """

    def __init__(self, mailbox: Mailbox, ranks: Sequence[int], stage_id: int, device: torch.device) -> None:
        self._mailbox, self._ranks, self._stage_id, self._device = mailbox, ranks, stage_id, device

    @property
    def is_first(self) -> bool:
        """Whether this stage takes inputs."""
        return self._stage_id == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage takes labels."""
        return self._stage_id == self.last_stage

    @property
    def last_stage(self) -> int:
        """K - 1."""
        return len(self._ranks) - 1

    def send_down(self, flow: Flow | None) -> None:
        """Outputs to the next stage; None: there are none, and no answer is wanted."""
        if flow is None:
            self._send(self._stage_id + 1, "down", None)
            return
        tensors = as_tuple(flow.values)
        payload = (isinstance(flow.values, tuple), flow.samples, flow.trains_above)
        self._send(self._stage_id + 1, "down", payload, tensors, tuple(tensor.requires_grad for tensor in tensors))

    def receive_down(self) -> Flow | None:
        """What the stage before sent."""
        message = self.receive("down")
        if message.payload is None:
            return None
        is_tuple, samples, trains = message.payload
        tensors = tuple(t.to(self._device).requires_grad_(g) for t, g in zip(message.tensors, message.requires_grad, strict=True))
        return Flow(values=tensors if is_tuple else tensors[0], samples=samples, trains_above=trains)

    def send_up(self, gradients: Sequence[Tensor] | None) -> None:
        """Gradients of what the stage before sent; None: there are none."""
        self._send(self._stage_id - 1, "up", gradients is not None, () if gradients is None else tuple(gradients))

    def receive_up(self) -> tuple[Tensor, ...] | None:
        """Gradients of what was sent to the next stage."""
        message = self.receive("up")
        return tuple(tensor.to(self._device) for tensor in message.tensors) if message.payload else None

    def send_home(self, channel: str, payload: Any, tensors: Sequence[Tensor] = ()) -> None:
        """Something to stage 0, which is not this one; there what the stages found is put together."""
        self._send(0, (channel, self._stage_id), payload, tensors)

    def from_stage(self, stage_id: int, channel: str) -> Message:
        """What another stage sent home on a channel; called there."""
        return self.receive((channel, stage_id))

    def from_others(self, channel: str) -> list[Message]:
        """The same of all other stages, in order."""
        return [self.from_stage(stage_id, channel) for stage_id in range(1, len(self._ranks))]

    def receive(self, channel: Hashable) -> Message:
        """The next message of a channel; blocks."""
        while not self._mailbox.has(channel):
            self._mailbox.wait()
        return self._mailbox.take(channel)

    def _send(
        self, stage_id: int, channel: Hashable, payload: Any, tensors: Sequence[Tensor] = (), flags: tuple[bool, ...] = ()
    ) -> None:
        on_host = tuple(tensor.detach().cpu() for tensor in tensors)
        self._mailbox.send(self._ranks[stage_id], channel, payload, on_host, flags)
