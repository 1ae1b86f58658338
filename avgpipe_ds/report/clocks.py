"""Puts the clocks of several machines right, by the messages between them.

A message can't arrive before it was sent. Where one seems to, the clocks of two neighbours differ; if the fastest message takes
as long in one direction as in the other, half the difference is what they differ by (as NTP does it). On one machine all ranks
have the same clock, and are left as they are.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from avgpipe_ds.tracing.chrome import message_key
from avgpipe_ds.tracing.spans import StageTrace

__all__ = ["on_one_clock"]


def on_one_clock(traces: list[StageTrace]) -> list[StageTrace]:
    """The traces in rank order, each on the clock of stage 0 of its replica."""
    replicas: defaultdict[int, list[StageTrace]] = defaultdict(list)
    for trace in traces:
        replicas[trace.replica_id].append(trace)
    moved: list[StageTrace] = []
    for replica in replicas.values():
        replica.sort(key=lambda trace: trace.stage_id)
        moved += _in_order(replica)
    return sorted(moved, key=lambda trace: trace.rank)


def _in_order(stages: list[StageTrace]) -> list[StageTrace]:
    result = stages[:1]
    for stage in stages[1:]:
        down, up = _fastest_ns(result[-1], stage), _fastest_ns(stage, result[-1])
        differ = down is not None and up is not None and min(down, up) < 0
        result.append(stage.shifted(((up or 0) - (down or 0)) // 2) if differ else stage)
    return result


def _fastest_ns(sender: StageTrace, receiver: StageTrace) -> int | None:
    """The least time from the beginning of sending to that of using a message, by their own clocks."""
    sent: dict[Any, int] = {}
    for span in sender.spans:
        message = message_key(sender, span)
        if message is not None and message[0]:
            sent[message[1]] = span.start_ns
    times = []
    for span in receiver.spans:
        message = message_key(receiver, span)
        if message is not None and not message[0] and message[1] in sent:
            times.append(span.start_ns - sent[message[1]])
    return min(times, default=None)
