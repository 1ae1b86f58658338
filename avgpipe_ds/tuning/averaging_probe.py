"""What averaging adds to an optimizer step, tried on copies: a profile of one pipeline has none."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch
from torch import Tensor

from avgpipe_ds.averaging.rules import AveragingRule
from avgpipe_ds.tuning.sample import device_time_s

__all__ = ["averaging_s"]

_REPEATS = 3
_ENOUGH_BYTES = 2**26
"""Weights that are tried; how long more of them take is in proportion."""


@torch.no_grad()
def averaging_s(rule: AveragingRule, masters: Sequence[Tensor], device: torch.device) -> float:
    """Seconds that one pipeline's share of an averaging takes.

    Args:
        rule: not initialized; it is used up.
        masters: what the optimizer steps on this stage.
        device: where they are.

    """
    total = sum(4 * master.numel() for master in masters)
    tried, size = [], 0
    for master in masters:
        if size < _ENOUGH_BYTES:
            tried.append(master.detach().float().clone())
            size += 4 * master.numel()
    if not size:
        return 0.0
    rule.initialize(tried)
    indices = range(len(tried))
    times = []
    for _ in range(_REPEATS):
        start = device_time_s(device)
        for _ in range(rule.num_pipelines):
            rule.before_step(tried, indices)
            rule.after_step(tried, indices)
        rule.finish_iteration()
        times.append((device_time_s(device) - start) / rule.num_pipelines)
    return statistics.median(times) * total / size
