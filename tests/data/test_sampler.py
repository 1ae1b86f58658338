import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from avgpipe_ds.data.sampler import BatchShape, Slot, epoch_order, order_by_length, plan_iteration, position_of

small = st.integers(1, 4)
shapes = st.builds(BatchShape, num_pipelines=small, num_replicas=small, num_micro_batches=small, micro_batch_size=small)


def rows_of_pipeline(pipeline):
    return [slot for replica in pipeline for micro_batch in replica for slot in micro_batch]


def plan_epoch(num_samples, shape, num_targets=None, seed=0):
    order = epoch_order(num_samples, seed=seed, epoch=0)
    targets = num_targets or [1] * num_samples
    return [plan_iteration(order, targets, shape, i) for i in range(shape.iterations_per_epoch(num_samples))]


def test_full_iteration_is_runs_in_order():
    shape = BatchShape(num_pipelines=2, num_replicas=1, num_micro_batches=2, micro_batch_size=2)
    half = [Slot(sample, 0.5) for sample in range(8)]
    assert plan_iteration(range(8), [1] * 8, shape, 0) == [[[half[0:2], half[2:4]]], [[half[4:6], half[6:8]]]]


def test_uneven_last_iteration_by_hand():
    # 3 samples are left for 2 pipelines of 2 micro-batches of 2: pipeline 0 gets two, pipeline 1 gets one.
    shape = BatchShape(num_pipelines=2, num_replicas=1, num_micro_batches=2, micro_batch_size=2)
    first, second = plan_iteration([7, 8, 9], [1] * 10, shape, 0)
    assert first == [[[Slot(7, 1.0), Slot(7, 0.0)], [Slot(8, 1.0), Slot(8, 0.0)]]]
    assert second == [[[Slot(9, 2.0), Slot(9, 0.0)], [Slot(9, 0.0), Slot(9, 0.0)]]]


def test_fewer_samples_than_pipelines_are_shared():
    shape = BatchShape(num_pipelines=3, num_replicas=1, num_micro_batches=1, micro_batch_size=1)
    assert [rows_of_pipeline(p) for p in plan_iteration([4, 5], [1] * 6, shape, 0)] == [
        [Slot(4, 1.0)],
        [Slot(5, 1.0)],
        [Slot(4, 1.0)],
    ]


@given(shapes, st.integers(1, 200), st.integers(0, 5))
def test_every_sample_once_an_epoch(shape, num_samples, seed):
    plans = plan_epoch(num_samples, shape, seed=seed)
    trained = Counter(
        slot.sample for plan in plans for pipeline in plan for slot in rows_of_pipeline(pipeline) if slot.weight > 0
    )
    left = num_samples % shape.samples_per_iteration
    if left == 0 or left >= shape.num_pipelines:
        assert trained == Counter(range(num_samples))
    else:  # pipelines without a sample of their own share
        assert set(trained) == set(range(num_samples))
        assert trained.total() == num_samples + shape.num_pipelines - left


@given(shapes, st.integers(1, 100))
def test_shapes_and_evenness(shape, num_samples):
    for plan in plan_epoch(num_samples, shape):
        assert len(plan) == shape.num_pipelines
        for pipeline in plan:
            assert len(pipeline) == shape.num_replicas
            assert all(len(replica) == shape.num_micro_batches for replica in pipeline)
            assert all(len(micro_batch) == shape.micro_batch_size for replica in pipeline for micro_batch in replica)
        real = [sum(slot.weight > 0 for slot in rows_of_pipeline(pipeline)) for pipeline in plan]
        assert max(real) - min(real) <= 1
        assert min(real) >= 1


@given(shapes, st.lists(st.integers(1, 50), min_size=1, max_size=60), st.randoms())
def test_mean_over_micro_batches_is_mean_over_targets(shape, num_targets, random):
    """The engine averages a pipeline's micro-batches, then its replicas; sample losses are sums over their targets."""
    losses = [random.uniform(0, 10) * targets for targets in num_targets]
    for plan in plan_epoch(len(num_targets), shape, num_targets):
        for pipeline in plan:
            micro_batches = [
                sum(slot.weight * losses[slot.sample] for slot in micro) for replica in pipeline for micro in replica
            ]
            real = [slot.sample for slot in rows_of_pipeline(pipeline) if slot.weight > 0]
            expected = sum(losses[s] for s in real) / sum(num_targets[s] for s in real)
            assert sum(micro_batches) / len(micro_batches) == pytest.approx(expected)


@given(shapes, st.integers(1, 100), st.integers(0, 500))
def test_position_counts_iterations(shape, num_samples, iteration):
    epoch, within = position_of(iteration, num_samples, shape)
    assert 0 <= within < shape.iterations_per_epoch(num_samples)
    assert epoch * shape.iterations_per_epoch(num_samples) + within == iteration


def test_order_depends_on_seed_and_epoch_only():
    orders = [tuple(epoch_order(50, seed=seed, epoch=epoch)) for seed, epoch in itertools.product(range(3), range(3))]
    assert len(set(orders)) == 9
    assert epoch_order(50, seed=1, epoch=2) == epoch_order(50, seed=1, epoch=2)
    assert sorted(orders[0]) == list(range(50))


def test_order_is_the_same_in_every_version():
    # A checkpoint of today must continue in the same order tomorrow.
    assert epoch_order(8, seed=0, epoch=0) == [0, 2, 1, 4, 6, 7, 3, 5]


@given(st.lists(st.integers(1, 500), min_size=1, max_size=700), st.integers(1, 5), st.integers(0, 3))
def test_order_by_length_is_a_permutation(lengths, size, epoch):
    order = order_by_length(lengths, size, seed=0, epoch=epoch)
    assert sorted(order) == list(range(len(lengths)))
    assert order == order_by_length(lengths, size, seed=0, epoch=epoch)


def test_order_by_length_saves_padding_and_still_shuffles():
    lengths = [5 + 37 * n % 196 for n in range(1001)]
    plain = epoch_order(1001, seed=0, epoch=0)

    def padded(order, size=4):
        return sum(max(lengths[s] for s in order[n : n + size]) * size for n in range(0, 1000, size))

    order = order_by_length(lengths, 4, seed=0, epoch=0)
    assert padded(order) < 1.1 * sum(lengths) < 1.3 * sum(lengths) < padded(plain)
    assert order != order_by_length(lengths, 4, seed=0, epoch=1)
    assert order != order_by_length(lengths, 4, seed=1, epoch=0)
    means = [sum(lengths[s] for s in order[n : n + 100]) / 100 for n in range(0, 1000, 100)]
    assert max(means) < 1.5 * min(means)  # long samples are spread over the epoch
    # 1001 samples make 250 micro-batches and a rest, which is last: the full ones stay where micro-batches begin
    runs = [sorted(lengths[s] for s in order[n : n + 4]) for n in range(0, 1000, 4)]
    assert sum(run[-1] - run[0] for run in runs) / len(runs) < 10


def test_behind_the_end():
    shape = BatchShape(num_pipelines=1, num_replicas=1, num_micro_batches=1, micro_batch_size=4)
    with pytest.raises(ValueError, match="behind the end of an epoch of 4"):
        plan_iteration(range(4), [1] * 4, shape, 1)


def test_shape_must_be_positive():
    with pytest.raises(ValueError, match="num_replicas must be at least 1, got 0"):
        BatchShape(num_pipelines=1, num_replicas=0, num_micro_batches=1, micro_batch_size=1)
