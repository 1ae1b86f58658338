import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from avgpipe_ds.hf import causal_lm_loss, sequence_classification_loss


def test_weighted_classification_is_the_mean_over_the_batch():
    """Micro-batches of 3, 1 and a padded 4: the mean over micro-batches is the mean over the 6 real samples."""
    logits, classes = torch.randn(6, 5), torch.randint(0, 5, (6,))
    expected = F.cross_entropy(logits, classes)
    num_micro_batches, weight = 3, 3 / 6
    padded = torch.cat([logits[4:], torch.randn(2, 5)]), torch.cat([classes[4:], torch.zeros(2, dtype=torch.long)])
    losses = [
        sequence_classification_loss(logits[:3], (classes[:3], torch.full((3,), weight))),
        sequence_classification_loss(logits[3:4], (classes[3:4], torch.full((1,), weight))),
        sequence_classification_loss(padded[0], (padded[1], torch.tensor([weight, weight, 0, 0]))),
    ]
    assert_close(sum(losses) / num_micro_batches, expected)


def test_weighted_causal_lm_is_the_mean_over_tokens():
    """Micro-batches of different lengths count by their target tokens."""
    micro_batches = [(torch.randn(2, 7, 11), torch.randint(0, 11, (2, 7))), (torch.randn(1, 4, 11), torch.randint(0, 11, (1, 4)))]
    micro_batches[0][1][1, 4:] = -100
    num_targets = 6 + 3 + 3
    token_losses = [
        F.cross_entropy(logits[row, :-1], labels[row, 1:], ignore_index=-100, reduction="sum")
        for logits, labels in micro_batches
        for row in range(len(labels))
    ]
    weight = len(micro_batches) / num_targets
    losses = [causal_lm_loss(logits, (labels, torch.full((len(labels),), weight))) for logits, labels in micro_batches]
    assert_close(sum(losses) / len(micro_batches), sum(token_losses) / num_targets)


@pytest.mark.parametrize("loss_fn", [causal_lm_loss, sequence_classification_loss])
def test_losses_are_fp32(loss_fn):
    logits = torch.randn(2, 3, 4, dtype=torch.bfloat16)
    labels = torch.randint(0, 4, (2, 3))
    if loss_fn is sequence_classification_loss:
        logits, labels = logits[:, 0], labels[:, 0]
    for target in (labels, (labels, torch.ones(2))):
        loss = loss_fn(logits, target)
        assert loss.dtype == torch.float32 and loss.shape == ()
        assert_close(loss, loss_fn(logits.float(), target))


def test_a_sample_without_targets_weighs_nothing():
    labels = torch.full((1, 4), -100)
    assert causal_lm_loss(torch.randn(1, 4, 9), (labels, torch.ones(1))) == 0
