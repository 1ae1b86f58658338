from itertools import combinations

import pytest
from conftest import TASKS, tiny_config
from hypothesis import given, settings
from hypothesis import strategies as st

from avgpipe_ds.hf import to_pipeline
from avgpipe_ds.hf.partition import balanced_parts


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


@pytest.mark.parametrize("method", ["compute", "parameters", "uniform", "type:Block"])
def test_methods(method):
    module = to_pipeline(tiny_config("gpt2"), num_stages=1, task=TASKS["gpt2"], partition_method=method)
    assert module.parts == [0, 7]


def test_counts_include_frozen_and_tied_parameters():
    module = to_pipeline(tiny_config("gpt2"), num_stages=1, task="causal-lm")
    block = 12 * 32 * 32 + 13 * 32
    assert module._parameter_counts == [61 * 32, 24 * 32, block, block, block, 2 * 32, 61 * 32]
