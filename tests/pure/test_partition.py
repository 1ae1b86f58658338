"""Stage boundaries against every possible cut."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from avgpipe_ds.partition import balanced_parts


def run_costs(costs, parts):
    return [sum(costs[start:stop]) for start, stop in zip(parts, parts[1:], strict=False)]


@settings(deadline=None)  # the machine may be busy
@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.data())
def test_no_cut_is_better(costs, data):
    num_parts = data.draw(st.integers(1, len(costs)))
    parts = balanced_parts(costs, num_parts)
    assert parts[0] == 0 and parts[-1] == len(costs) and sorted(set(parts)) == parts and len(parts) == num_parts + 1

    def badness(cut):
        runs = run_costs(costs, cut)
        return max(runs), sum(cost**2 for cost in runs)

    cuts = [[0, *inner, len(costs)] for inner in combinations(range(1, len(costs)), num_parts - 1)]
    assert badness(parts) == min(map(badness, cuts))


def test_the_dearest_run_comes_before_the_squares():
    """The least sum of squares alone, 515, would make a run of 14."""
    costs = [8, 6, 9, 9, 4, 7, 4, 2]
    runs = run_costs(costs, balanced_parts(costs, 5))
    assert max(runs) == 13 and sum(cost**2 for cost in runs) == 519


def test_too_many_parts_are_refused():
    with pytest.raises(ValueError, match="1 to 2 parts for 2 layers, got 3"):
        balanced_parts([1, 1], 3)


layers = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=8)


@settings(deadline=None)
@given(layers, st.data(), st.integers(0, 30))
def test_no_cut_within_a_limit_is_better(found, data, limit):
    costs, sizes = [one[0] for one in found], [one[1] for one in found]
    num_parts = data.draw(st.integers(1, len(costs)))
    cuts = [[0, *inner, len(costs)] for inner in combinations(range(1, len(costs)), num_parts - 1)]
    cuts = [cut for cut in cuts if all(size <= limit for size in run_costs(sizes, cut))]
    if not cuts:
        with pytest.raises(ValueError, match=f"no {num_parts} parts of these layers keep within {limit} each"):
            balanced_parts(costs, num_parts, sizes=sizes, size_limit=limit)
        return
    chosen = balanced_parts(costs, num_parts, sizes=sizes, size_limit=limit)
    assert chosen in cuts
    assert max(run_costs(costs, chosen)) == min(max(run_costs(costs, cut)) for cut in cuts)
