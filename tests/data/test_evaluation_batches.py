from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from avgpipe_ds.data import Collate, Sample, evaluation_batches
from avgpipe_ds.data.evaluation import plan_evaluation
from avgpipe_ds.errors import DataError

COLLATE = Collate(pad_token_id=0, multiple_of=1)


@given(st.integers(1, 80), st.integers(1, 5), st.integers(1, 3))
def test_every_sample_once(num_samples, size, replicas):
    plan = plan_evaluation([1 + number % 5 for number in range(num_samples)], micro_batch_size=size, num_replicas=replicas)
    assert len(plan) == replicas
    assert len({len(replica) for replica in plan}) == 1
    rows = [row for replica in plan for row in replica]
    assert all(len(row) == size for row in rows)
    assert Counter(slot.sample for row in rows for slot in row if slot.weight) == Counter(range(num_samples))
    assert {slot.weight for row in rows for slot in row} <= {0.0, 1.0}


def test_longest_first_and_like_lengths_together():
    samples = [Sample([number] * (1 + number % 4), number, 1) for number in range(8)]
    batches = evaluation_batches(samples, COLLATE, micro_batch_size=2)
    assert [batch[0][0].shape[1] for batch in batches] == [4, 3, 2, 1]
    assert [labels.tolist() for _, (labels, _) in batches] == [[3, 7], [2, 6], [1, 5], [0, 4]]
    assert [[slot.sample for slot in row] for row in batches.plan] == [[3, 7], [2, 6], [1, 5], [0, 4]]
    assert torch.equal(batches[1:][0][0][0], batches[1][0][0])
    assert len(batches[1:3]) == 2


def test_a_replica_with_nothing_left_gets_weight_zero():
    samples = [Sample([1], 0, 1)] * 3
    first, second = (evaluation_batches(samples, COLLATE, micro_batch_size=1, replica=r, num_replicas=2) for r in (0, 1))
    assert [weight.tolist() for _, (_, weight) in first] == [[1.0], [1.0]]
    assert [weight.tolist() for _, (_, weight) in second] == [[1.0], [0.0]]


def test_wrong_arguments():
    with pytest.raises(DataError, match="no sample to evaluate"):
        evaluation_batches([], COLLATE, micro_batch_size=1)
    with pytest.raises(ValueError, match="replica=2, num_replicas=2"):
        evaluation_batches([Sample([1], 0, 1)], COLLATE, micro_batch_size=1, replica=2, num_replicas=2)
