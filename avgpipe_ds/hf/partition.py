"""Cut a row of layers into stages of equal cost.

DeepSpeed's own balancing builds every layer on every rank to count trainable parameters only, and may leave a stage empty.
Here the costs come from shapes alone, every stage gets a layer, and the cut is optimal.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def balanced_parts(costs: Sequence[float], num_parts: int) -> list[int]:
    """Boundaries `[0, ..., len(costs)]` of `num_parts` non-empty runs of layers.

    The dearest run is as cheap as can be, and among the cuts with that property the sum of squared costs is smallest, so
    that no run is needlessly dear because another one must be.
    """
    if not 1 <= num_parts <= len(costs):
        raise ValueError(f"expected 1 to {len(costs)} parts for {len(costs)} layers, got {num_parts}")
    limit = _best_cut(costs, num_parts, power=1, limit=float("inf"))[0]
    return _best_cut(costs, num_parts, power=2, limit=limit)[1]


def _best_cut(costs: Sequence[float], num_parts: int, *, power: int, limit: float) -> tuple[float, list[int]]:
    """The best cut whose runs cost at most `limit`: by the dearest run (`power` 1), or by the sum of squares (`power` 2)."""
    before = [0.0, *accumulate(costs)]
    # best[stop]: the cut of costs[:stop] into the parts so far
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [0])}
    for _ in range(num_parts):
        extended: dict[int, tuple[float, list[int]]] = {}
        for start, (value, parts) in best.items():
            for stop in range(start + 1, len(costs) + 1):
                cost = before[stop] - before[start]
                if cost > limit:
                    break
                total = max(value, cost) if power == 1 else value + cost**2
                if stop not in extended or total < extended[stop][0]:
                    extended[stop] = (total, [*parts, stop])
        best = extended
    return best[len(costs)]
