"""Cut a row of layers into stages of equal cost. Pure.

DeepSpeed's own balancing builds every layer on every rank to count trainable parameters only, and may leave a stage empty.
Here the costs are given, every stage gets a layer, and the cut is optimal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

__all__ = ["balanced_parts"]

Fits = Callable[[int, int], bool]


def balanced_parts(
    costs: Sequence[float], num_parts: int, *, sizes: Sequence[float] | None = None, size_limit: float | None = None
) -> list[int]:
    """Boundaries `[0, ..., len(costs)]` of `num_parts` non-empty runs of layers.

    The dearest run is as cheap as can be, and among the cuts with that property the sum of squared costs is smallest, so
    that no run is needlessly dear because another one must be.

    Args:
        costs: of each layer, such as its time.
        num_parts: K.
        sizes: of each layer, such as its memory; with `size_limit`.
        size_limit: the most that the layers of a run may have together.

    Raises:
        ValueError: there are fewer layers than parts, or no cut keeps within the limit.

    """
    if not 1 <= num_parts <= len(costs):
        raise ValueError(f"expected 1 to {len(costs)} parts for {len(costs)} layers, got {num_parts}")
    fits = _within(sizes, size_limit)
    cheapest = _best_cut(costs, num_parts, fits, power=1, limit=float("inf"))
    if cheapest is None:
        raise ValueError(
            f"no {num_parts} parts of these layers keep within {size_limit:g} each: they have {sum(sizes or ()):g} together, the"
            f" largest layer {max(sizes or (0,)):g}"
        )
    best = _best_cut(costs, num_parts, fits, power=2, limit=cheapest[0])
    assert best is not None
    return best[1]


def _within(sizes: Sequence[float] | None, limit: float | None) -> Fits:
    """Whether the layers from `start` to `stop`, that one not included, keep within the limit."""
    if sizes is None or limit is None:
        return lambda start, stop: True
    before = [0.0, *accumulate(sizes)]
    return lambda start, stop: before[stop] - before[start] <= limit


def _best_cut(costs: Sequence[float], num_parts: int, fits: Fits, *, power: int, limit: float) -> tuple[float, list[int]] | None:
    """The best cut whose runs cost at most `limit`: by the dearest run (`power` 1), or by the sum of squares (`power` 2)."""
    before = [0.0, *accumulate(costs)]
    # best[stop]: the cut of costs[:stop] into the parts so far
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [0])}
    for _ in range(num_parts):
        extended: dict[int, tuple[float, list[int]]] = {}
        for start, (value, parts) in best.items():
            for stop in range(start + 1, len(costs) + 1):
                cost = before[stop] - before[start]
                if cost > limit or not fits(start, stop):
                    break
                total = max(value, cost) if power == 1 else value + cost**2
                if stop not in extended or total < extended[stop][0]:
                    extended[stop] = (total, [*parts, stop])
        best = extended
    return best.get(len(costs))
