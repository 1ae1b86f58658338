from hypothesis import given
from hypothesis import strategies as st

from avgpipe_ds.data.splits import hold_out, hold_out_groups, hold_out_tail, thinned


def test_tail():
    assert hold_out_tail(10, 0.2) == (list(range(8)), [8, 9])
    assert hold_out_tail(2, 0.01) == ([0], [1])


@given(st.lists(st.integers(0, 3), min_size=2, max_size=60), st.floats(0.01, 0.9))
def test_hold_out_divides_and_leaves_every_class_in_training(labels, fraction):
    train, validation = hold_out(labels, fraction)
    assert sorted(train + validation) == list(range(len(labels)))
    assert validation
    if len(set(labels)) < len(labels) and all(labels.count(label) > 1 for label in labels):
        assert {labels[row] for row in train} == set(labels)


@given(st.lists(st.sampled_from("abcdef"), max_size=40))
def test_groups_stay_together(groups):
    train, validation = hold_out_groups(groups, 0.4)
    assert sorted(train + validation) == list(range(len(groups)))
    assert not {groups[row] for row in train} & {groups[row] for row in validation}


def test_thinned():
    assert thinned([1, 2, 3], None) == thinned([1, 2, 3], 7) == [1, 2, 3]
    assert thinned(range(100), 5) == sorted(thinned(range(100), 5))
