"""Stages of equal time, by the measured times of their layers (not by their numbers of parameters). Pure."""

from __future__ import annotations

from dataclasses import dataclass

from avgpipe_ds.partition import balanced_parts
from avgpipe_ds.tuning.profile import Profile

__all__ = ["Proposal", "propose_partition"]

_WORTH = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """Boundaries that even the stages out.

    Attributes:
        partition: K + 1 layer numbers where stages begin, and the last one ends.
        gain: the part of the slowest stage's time that is saved.

    """

    partition: tuple[int, ...]
    gain: float


def propose_partition(profile: Profile, *, memory_limit: float | None = None, num_pipelines: int = 1) -> Proposal | None:
    """Better boundaries than the present ones; None if there are none that save 3 % of the slowest stage's time.

    Args:
        profile: with layers.
        memory_limit: bytes of every accelerator. Each layer counts with its weights, their share of gradients, optimizer states
            and reference, and the activations of K micro-batches, the most that 1F1B stores.
        num_pipelines: N.

    """
    stages, num_stages = profile.stages, len(profile.stages)
    if not all(stage.layers for stage in stages):
        return None
    costs, sizes = [], []
    for stage in stages:
        own = num_pipelines * (stage.weights + stage.gradients + stage.optimizer) + stage.frozen
        state = own + (stage.reference if num_pipelines > 1 else 0)
        weights = max(1, sum(layer.weights for layer in stage.layers))
        for layer in stage.layers:
            costs.append(layer.seconds)
            sizes.append(state * layer.weights / weights + num_pipelines * num_stages * layer.activation_bytes)
    try:
        parts = balanced_parts(costs, num_stages, sizes=sizes, size_limit=memory_limit)
    except ValueError:  # none fits: what to do about memory is said elsewhere
        return None
    present = max(sum(layer.seconds for layer in stage.layers) for stage in stages)
    proposed = max(sum(costs[start:stop]) for start, stop in zip(parts, parts[1:], strict=False))
    gain = 1 - proposed / present
    return Proposal(partition=tuple(parts), gain=gain) if gain >= _WORTH else None
