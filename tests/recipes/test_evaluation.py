import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from common.evaluation import Validation, validate

from avgpipe_ds.data import Collate, Sample


class OneStage:
    """An engine of one stage: its 'model' answers class 1 for even first tokens, at a loss of the first token's value."""

    device = torch.device("cpu")
    grid = SimpleNamespace(get_data_parallel_world_size=lambda: 1, get_data_parallel_rank=lambda: 0)

    def is_last_stage(self):
        return True

    def eval_batch(self, data_iter, return_logits, num_micro_batches):
        losses, outputs = [], []
        for (ids, _), (_, weight) in data_iter:
            losses.append((ids[:, 0] * weight).sum())
            outputs.append(torch.nn.functional.one_hot(1 - ids[:, 0] % 2, 2).float())
        assert len(losses) == num_micro_batches
        mean = torch.stack(losses).mean()
        return (mean, outputs) if return_logits else mean


@pytest.fixture
def process_group(tmp_path):
    if dist.is_initialized():  # by tests of another folder, for the whole session
        yield
        return
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_accuracy_and_loss_are_exact(process_group):
    # 53 samples in micro-batches of 3: the last one is filled up with 1 copy, which must count for nothing.
    samples = [Sample([number] * (1 + number % 4), int(number % 3 == 0), 1) for number in range(53)]
    found = validate(OneStage(), samples, Collate(pad_token_id=0, max_length=8), micro_batch_size=3)
    assert found.num_samples == 53
    assert found.loss == pytest.approx(sum(range(53)) / 53)
    assert found.accuracy == pytest.approx(sum((n % 2 == 0) == (n % 3 == 0) for n in range(53)) / 53)


def test_language_model_loss_is_per_token():
    samples = [Sample([number] * length, None, length - 1) for number, length in ((3, 4), (5, 9))]
    found = validate(OneStage(), samples, Collate(pad_token_id=0, max_length=16), micro_batch_size=4)
    assert found.loss == pytest.approx((3 + 5) / (3 + 8))
    assert found.accuracy is None
    assert found.perplexity == pytest.approx(math.exp(8 / 11))


def test_hopeless_perplexity_is_infinite():
    assert Validation(loss=1e4, num_samples=1, accuracy=None).perplexity == math.inf
