"""How long messages take between neighbouring stages, with nothing else under way."""

from __future__ import annotations

import statistics
import time

import torch

from avgpipe_ds.execution.stage import Stage
from avgpipe_ds.tuning.profile import Message
from avgpipe_ds.tuning.sample import device_time_s

__all__ = ["probe_links"]

_REPEATS = 5
_IN_A_ROW = 4
"""A single message may pass a shaped link in its burst; several in a row go at its bandwidth."""
_THERE, _BACK = "link-probe", "link-probe-reply"


def probe_links(stage: Stage, *, activation_bytes: int, gradient_bytes: int) -> tuple[Message, Message]:
    """What this stage's messages to the next and to the previous one take; empty where there is none.

    Every rank calls it. Links are tried one after the other, those of data-parallel replicas at the same time.

    Args:
        stage: of this rank.
        activation_bytes: of one to the next stage.
        gradient_bytes: of one to the previous stage.

    """
    topology, found = stage.topology, {}
    ranks = topology.pipeline_ranks
    links = [pair for a, b in zip(ranks, ranks[1:], strict=False) for pair in ((a, b), (b, a))]
    for number, (sender, receiver) in enumerate(links):
        stage.rendezvous.gather(("link-probe", number), topology.world_ranks)
        if topology.rank == sender:
            down = ranks.index(receiver) > ranks.index(sender)
            found[down] = _send(stage, receiver, activation_bytes if down else gradient_bytes)
        elif topology.rank == receiver:
            _answer(stage, sender)
    return found.get(True, Message()), found.get(False, Message())


def _send(stage: Stage, receiver: int, size: int) -> Message:
    nothing = torch.zeros(0, dtype=torch.uint8, device=stage.device)
    content = torch.zeros(size, dtype=torch.uint8, device=stage.device)
    empty_s = [_round_trip_s(stage, receiver, (nothing,)) for _ in range(_REPEATS)]
    full_s = [_round_trip_s(stage, receiver, (content,) * _IN_A_ROW) for _ in range(_REPEATS)]
    round_trip_s = statistics.median(empty_s)
    transfer_s = max(0.0, statistics.median(full_s) - round_trip_s) / _IN_A_ROW
    return Message(size=size, latency_s=round_trip_s / 2, transfer_s=transfer_s)


def _round_trip_s(stage: Stage, receiver: int, contents: tuple[torch.Tensor, ...]) -> float:
    start = time.perf_counter()
    for place, content in enumerate(contents):
        stage.mailbox.send(receiver, _THERE, place == len(contents) - 1, (content,))
    _receive(stage, _BACK)
    return time.perf_counter() - start


def _answer(stage: Stage, sender: int) -> None:
    for _ in range(2 * _REPEATS):
        while not _receive(stage, _THERE):
            pass
        device_time_s(stage.device)  # what came is there, not only ordered
        stage.mailbox.send(sender, _BACK)


def _receive(stage: Stage, channel: str) -> bool:
    """Wait for the next message of a channel; whether it is the last one in a row."""
    while not stage.mailbox.has(channel):
        stage.mailbox.wait()
    return bool(stage.mailbox.take(channel).payload)
