"""Stage boundaries against every possible cut."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from avgpipe_ds.tuning.balance import balance

layers = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=8)


def every_cut(count, num_stages):
    return [[0, *inner, count] for inner in combinations(range(1, count), num_stages - 1)]


@given(layers, st.integers(1, 5), st.none() | st.integers(0, 30))
def test_no_cut_is_better(found, num_stages, limit):
    seconds, sizes = [one[0] for one in found], [one[1] for one in found]
    cuts = [
        cut
        for cut in every_cut(len(found), num_stages)
        if limit is None or all(sum(sizes[a:b]) <= limit for a, b in pairwise(cut))
    ]
    if num_stages > len(found) or not cuts:
        with pytest.raises(ValueError, match="do not make|keep within"):
            balance(seconds, num_stages, sizes=sizes, limit=limit)
        return

    def slowest(cut):
        return max(sum(seconds[a:b]) for a, b in pairwise(cut))

    chosen = balance(seconds, num_stages, sizes=sizes, limit=limit)
    assert chosen in cuts
    assert slowest(chosen) == min(slowest(cut) for cut in cuts)
    assert chosen == min(cut for cut in cuts if slowest(cut) == slowest(chosen))


def test_a_heavy_head_gets_a_stage_of_its_own():
    assert balance([1, 1, 1, 1, 1, 5], 2) == [0, 5, 6]
    assert balance([2.0] * 6, 3) == [0, 2, 4, 6]
    with pytest.raises(ValueError, match="2 layers do not make 3 stages"):
        balance([1, 1], 3)
    with pytest.raises(ValueError, match="within 5 bytes each: they need 9 together, the largest layer 6"):
        balance([1, 1], 2, sizes=[3, 6], limit=5)
