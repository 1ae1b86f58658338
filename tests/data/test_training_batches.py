import pytest
import torch

from avgpipe_ds.data import BatchShape, Collate, Sample, TrainingBatches
from avgpipe_ds.errors import DataError

SHAPE = BatchShape(num_pipelines=2, num_replicas=2, num_micro_batches=2, micro_batch_size=2)
COLLATE = Collate(pad_token_id=0, max_length=20)
SAMPLES = [Sample([1 + n] * (3 + n % 7), n % 3, 1) for n in range(37)]  # 3 iterations of 16 an epoch, the last one uneven


def batches(iterations=5, **options):
    return TrainingBatches(options.pop("samples", SAMPLES), COLLATE, SHAPE, iterations=iterations, **options)


def same(a, b):
    flat = [[t for inputs, labels in batch for t in (*inputs, *labels)] for batch in (a, b)]
    return len(flat[0]) == len(flat[1]) and all(torch.equal(x, y) for x, y in zip(*flat, strict=True))


@pytest.mark.parametrize("group_by_length", [False, True])
def test_resumed_run_continues_exactly(group_by_length):
    whole = list(batches(group_by_length=group_by_length))
    assert len(whole) == 5 * SHAPE.num_pipelines * SHAPE.num_micro_batches
    for trained in range(len(whole) + 1):
        first = batches(group_by_length=group_by_length)
        for _ in range(min(trained + 4, len(whole))):  # the engine takes an iteration ahead
            next(first)
        resumed = batches(group_by_length=group_by_length)
        resumed.load_state_dict(first.state_dict(trained))
        assert same(whole[trained:], list(resumed))


def test_position_is_of_what_was_trained():
    data = batches()
    for _ in range(20):
        next(data)
    state = data.state_dict(16)
    assert (state["epoch"], state["iteration"], state["micro_batch"]) == (1, 1, 0)
    assert data.state_dict(13)["micro_batch"] == 1
    with pytest.raises(ValueError, match="21 micro-batches are said to be trained, but 20 were taken"):
        data.state_dict(21)


def test_a_loaded_position_replaces_what_was_taken():
    data = batches()
    whole = [next(data) for _ in range(12)]
    data.load_state_dict(data.state_dict(4))
    assert same(whole[4:8], [next(data) for _ in range(4)])
    assert data.state_dict(8)["iteration"] == 2
    with pytest.raises(ValueError, match="9 micro-batches are said to be trained, but 8 were taken"):
        data.state_dict(9)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"seed": 1}, "seed 0 there, 1 here"),
        ({"samples": SAMPLES[:-1]}, "samples 37 there, 36 here"),
        ({"group_by_length": True}, "group by length False there, True here"),
    ],
)
def test_position_in_other_data(other, message):
    with pytest.raises(DataError, match=message):
        batches(**other).load_state_dict(batches().state_dict(0))


def test_position_in_another_division():
    other = BatchShape(num_pipelines=1, num_replicas=2, num_micro_batches=2, micro_batch_size=4)
    state = TrainingBatches(SAMPLES, COLLATE, other, iterations=1).state_dict(0)
    with pytest.raises(DataError, match="num pipelines 1 there, 2 here; micro batch size 4 there, 2 here"):
        batches().load_state_dict(state)


@pytest.mark.parametrize("group_by_length", [False, True])
def test_replicas_divide_an_epoch(group_by_length):
    seen = [
        int(ids[row, 0]) - 1
        for replica in range(2)
        for (ids, _), (_, weight) in batches(3, replica=replica, group_by_length=group_by_length)
        for row in range(2)
        if weight[row] > 0
    ]
    assert sorted(seen) == list(range(37))


def test_samples_of_like_length_are_together():
    samples = [Sample([1] * (1 + n * 19 % 64), 0, 1) for n in range(64)]
    shape = BatchShape(num_pipelines=1, num_replicas=1, num_micro_batches=4, micro_batch_size=4)

    def computed(**options):
        return sum(ids.numel() for (ids, _), _ in TrainingBatches(samples, Collate(pad_token_id=0), shape, epochs=1, **options))

    assert computed(group_by_length=True) < 0.8 * computed()


def test_every_epoch_has_another_order():
    first, second = (list(batches(6))[start : start + 12] for start in (0, 12))
    assert not same(first, second)
    assert not same(first, list(batches(3, seed=1)))


def test_ends_with_the_last_iteration():
    assert list(batches(0)) == []
    data = TrainingBatches(SAMPLES, COLLATE, SHAPE, epochs=2)
    assert data.num_iterations == 6
    assert len(list(data)) == 24
    with pytest.raises(StopIteration):
        next(data)


def test_smaller_than_one_batch_trains():
    assert len(list(batches(2, samples=SAMPLES[:1]))) == 8


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"samples": []}, DataError, "no sample to train on"),
        ({"samples": [*SAMPLES, Sample([1], None, 0)]}, DataError, "Sample 37 has no target"),
        ({"replica": 2}, ValueError, r"replica must lie in 0 \.\. 1, got 2"),
        ({"epochs": 1}, ValueError, "either epochs or iterations, got epochs=1 and iterations=5"),
        ({"iterations": None}, ValueError, "either epochs or iterations, got epochs=None"),
    ],
)
def test_wrong_arguments_are_errors_at_once(wrong, error, message):
    with pytest.raises(error, match=message):
        batches(**wrong)
