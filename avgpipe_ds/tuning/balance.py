"""Stages of equal time, by the measured times of their layers (not by their numbers of parameters). Pure."""

from __future__ import annotations

from dataclasses import dataclass

from avgpipe_ds.partition import balanced_parts
from avgpipe_ds.schedules.plans import most_stored
from avgpipe_ds.tuning.profile import Profile
from avgpipe_ds.tuning.setting import Setting

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


def propose_partition(profile: Profile, setting: Setting, *, memory_limit: float | None = None) -> Proposal | None:
    """Better boundaries than the present ones; None if there are none that save 3 % of the slowest stage's time.

    Args:
        profile: with layers.
        setting: that the stages are to train with.
        memory_limit: bytes of every accelerator. Each layer counts with its weights, their share of gradients, optimizer states
            and reference, and the activations of as many micro-batches as the first stage stores.

    """
    stages, num_stages = profile.stages, len(profile.stages)
    if not all(stage.layers for stage in stages):
        return None
    costs, sizes = [], []
    stored = most_stored(setting.plans(num_stages), setting.num_pipelines)[0]
    scale = profile.batch / setting.num_micro_batches / profile.micro_batch
    for stage in stages:
        state = stage.state.of_pipelines(setting.num_pipelines).total
        weights = max(1, sum(layer.weights for layer in stage.layers))
        for layer in stage.layers:
            costs.append(layer.seconds)
            sizes.append(state * layer.weights / weights + stored * scale * layer.activation_bytes)
    try:
        parts = balanced_parts(costs, num_stages, sizes=sizes, size_limit=memory_limit)
    except ValueError:  # none fits: what to do about memory is said elsewhere
        return None
    present = max(sum(layer.seconds for layer in stage.layers) for stage in stages)
    proposed = max(sum(costs[start:stop]) for start, stop in zip(parts, parts[1:], strict=False))
    gain = 1 - proposed / present
    return Proposal(partition=tuple(parts), gain=gain) if gain >= _WORTH else None
