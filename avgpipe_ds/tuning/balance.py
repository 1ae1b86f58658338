"""Layer boundaries that even out the stages, by measured time and memory (not by the number of parameters)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

__all__ = ["balance"]


def balance(
    seconds: Sequence[float], num_stages: int, *, sizes: Sequence[int] | None = None, limit: int | None = None
) -> list[int]:
    """Cut layers into stages so that the slowest stage is as fast as can be.

    Args:
        seconds: of each layer, forward and backward, in order.
        num_stages: K; each stage gets at least one layer.
        sizes: bytes of each layer, of all pipelines, with what it keeps for backwards; with `limit`.
        limit: the most bytes that a stage may need.

    Returns:
        K + 1 numbers: stage k has the layers `boundaries[k]` to `boundaries[k + 1]`, the latter not included. Of several that are
        as fast, those whose first stages are the shortest: early stages keep most micro-batches.

    Raises:
        ValueError: there are fewer layers than stages, or no cut keeps every stage within the limit.

    """
    count = len(seconds)
    if not 1 <= num_stages <= count:
        raise ValueError(f"{count} layers do not make {num_stages} stages: each needs at least one")
    until_s = [0.0, *accumulate(seconds)]
    until_size = [0, *accumulate(sizes or [0] * count)]

    def stage_s(first: int, end: int) -> float:
        if limit is not None and until_size[end] - until_size[first] > limit:
            return math.inf
        return until_s[end] - until_s[first]

    # slowest[n][first]: of the layers from `first` on, cut into n + 1 stages as well as can be.
    slowest = [[stage_s(first, count) for first in range(count)]]
    for _ in range(num_stages - 1):
        rest = slowest[-1]
        slowest.append(
            [
                min((max(stage_s(first, end), rest[end]) for end in range(first + 1, count)), default=math.inf)
                for first in range(count)
            ]
        )
    best = slowest[-1][0]
    if math.isinf(best):
        raise ValueError(
            f"no {num_stages} stages of these layers keep within {limit} bytes each: they need {until_size[-1]} together,"
            f" the largest layer {max(sizes or [0])}"
        )
    boundaries = [0]
    for rest in reversed(slowest[:-1]):
        first = boundaries[-1]
        boundaries.append(next(end for end in range(first + 1, count) if max(stage_s(first, end), rest[end]) <= best))
    return [*boundaries, count]
