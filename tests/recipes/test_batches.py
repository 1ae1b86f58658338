import pytest
import torch
from common.batches import Collate, training_batches
from common.errors import RecipeError
from common.sampler import BatchShape
from common.samples import Sample

SHAPE = BatchShape(num_pipelines=2, num_replicas=2, num_micro_batches=2, micro_batch_size=2)
COLLATE = Collate(pad_token_id=0, max_length=20)
SAMPLES = [Sample([1 + n] * (3 + n % 7), n % 3, 1) for n in range(37)]


def batches(*, replica=0, first=0, last=5, samples=SAMPLES, seed=0):
    return list(training_batches(samples, COLLATE, SHAPE, replica=replica, seed=seed, first_iteration=first, num_iterations=last))


def same(a, b):
    flat = [[t for inputs, labels in batch for t in (*inputs, *labels)] for batch in (a, b)]
    return len(flat[0]) == len(flat[1]) and all(torch.equal(x, y) for x, y in zip(*flat, strict=True))


def test_collate_classes():
    (ids, mask), (labels, weight) = COLLATE([Sample([5, 6, 7], 2, 1), Sample([8] * 9, 0, 1)], [0.5, 0.0])
    assert ids.shape == mask.shape == (2, 16)
    assert ids.dtype == mask.dtype == labels.dtype == torch.int64
    assert weight.dtype == torch.float32
    assert ids[0].tolist() == [5, 6, 7] + [0] * 13
    assert mask.sum(dim=1).tolist() == [3, 9]
    assert labels.tolist() == [2, 0]
    assert weight.tolist() == [0.5, 0.0]


def test_collate_tokens_and_length_limit():
    (ids, mask), (labels, _) = COLLATE([Sample([5] * 19, None, 18), Sample([6, 7], None, 1)], [1.0, 1.0])
    assert ids.shape == (2, 20)  # 24 would be the next multiple of 8, but no position lies behind 20
    assert labels[1].tolist() == [6, 7] + [-100] * 18
    assert torch.equal(labels[mask == 1], ids[mask == 1])


def test_resumed_run_continues_exactly():
    whole = batches()  # 37 samples in iterations of 16: 3 an epoch, so 5 iterations cross into the next
    assert len(whole) == 5 * SHAPE.num_pipelines * SHAPE.num_micro_batches
    for first in range(6):
        assert same(whole[first * 4 :], batches(first=first))


def test_replicas_divide_an_epoch():
    seen = [
        int(ids[row, 0]) - 1
        for replica in range(2)
        for (ids, _), (_, weight) in batches(replica=replica, last=3)
        for row in range(2)
        if weight[row] > 0
    ]
    assert sorted(seen) == list(range(37))


def test_ends_with_the_last_iteration():
    assert batches(last=0) == []
    assert batches(first=5, last=5) == []


def test_smaller_than_one_batch_trains():
    assert len(batches(samples=SAMPLES[:1], last=2)) == 8


def test_empty_is_an_error_at_once():
    with pytest.raises(RecipeError, match="no sample"):
        training_batches([], COLLATE, SHAPE, replica=0, seed=0, first_iteration=0, num_iterations=1)
