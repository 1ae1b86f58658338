"""The default losses against those of torch and transformers over the whole batch."""

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import tiny_config
from torch.testing import assert_close
from transformers import AutoModelForSequenceClassification
from transformers.loss.loss_utils import ForSequenceClassificationLoss
from transformers.trainer_pt_utils import LabelSmoother

from avgpipe_ds.hf import causal_lm_loss, sequence_classification_loss, to_pipeline, token_loss
from avgpipe_ds.hf.losses import (
    CausalLMLoss,
    MultiLabelLoss,
    RegressionLoss,
    SequenceClassificationLoss,
    TokenLoss,
    default_loss,
)

CLASSIFY = "sequence-classification"
IDS = torch.tensor([0, 3, 1, 4])


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


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
def test_weighted_causal_lm_is_the_mean_over_tokens(smoothing):
    """Micro-batches of different lengths count by their target tokens."""
    micro_batches = [(torch.randn(2, 7, 11), torch.randint(0, 11, (2, 7))), (torch.randn(1, 4, 11), torch.randint(0, 11, (1, 4)))]
    micro_batches[0][1][1, 4:] = -100
    num_targets = 6 + 3 + 3
    token_losses = [
        F.cross_entropy(logits[row, :-1], labels[row, 1:], ignore_index=-100, reduction="sum", label_smoothing=smoothing)
        for logits, labels in micro_batches
        for row in range(len(labels))
    ]
    weight, loss_fn = len(micro_batches) / num_targets, CausalLMLoss(label_smoothing=smoothing)
    losses = [loss_fn(logits, (labels, torch.full((len(labels),), weight))) for logits, labels in micro_batches]
    assert_close(sum(losses) / len(micro_batches), sum(token_losses) / num_targets)


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("smoothing", [0.1, 0.5])
def test_label_smoothing_is_that_of_transformers(smoothing, shifted):
    logits, labels = torch.randn(3, 9, 11), torch.randint(0, 11, (3, 9))
    labels[1, 5:] = -100
    expected = LabelSmoother(epsilon=smoothing)({"logits": logits}, labels, shift_labels=shifted)
    loss_fn = (CausalLMLoss if shifted else TokenLoss)(label_smoothing=smoothing)
    assert_close(loss_fn(logits, labels), expected)
    targets = labels[:, 1:] if shifted else labels
    weight = torch.full((3,), 1 / int((targets != -100).sum()))
    assert_close(loss_fn(logits, (labels, weight)), expected)


def test_label_smoothing_of_classes_is_that_of_torch():
    logits, classes = torch.randn(4, 5), torch.tensor([0, 4, -100, 2])
    expected = F.cross_entropy(logits, classes, label_smoothing=0.2)
    assert_close(SequenceClassificationLoss(label_smoothing=0.2)(logits, classes), expected)


@pytest.mark.parametrize("smoothing", [-0.1, 1.0, float("nan")])
def test_label_smoothing_that_cannot_be(smoothing):
    with pytest.raises(ValueError, match="label_smoothing must be from 0 to below 1, got"):
        TokenLoss(label_smoothing=smoothing)


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


@pytest.mark.parametrize(
    ("options", "labels"),
    [
        pytest.param({"num_labels": 1}, torch.randn(4), id="one number"),
        pytest.param({"num_labels": 1}, torch.randn(4, 1), id="one number in a column"),
        pytest.param({"num_labels": 3, "problem_type": "regression"}, torch.randn(4, 3), id="numbers"),
        pytest.param({"num_labels": 3, "problem_type": "multi_label_classification"}, torch.rand(4, 3).round(), id="multi-label"),
        pytest.param({"num_labels": 5}, IDS, id="classes"),
        pytest.param({"num_labels": 5, "problem_type": "single_label_classification"}, IDS, id="classes by name"),
    ],
)
def test_the_loss_of_a_sequence_is_that_of_transformers(options, labels):
    """With plain labels, and with weights over micro-batches of 3 and 1."""
    config = tiny_config("bert")
    config.num_labels, config.problem_type = options["num_labels"], options.get("problem_type")
    loss_fn = default_loss(CLASSIFY, config)
    logits = torch.randn(4, config.num_labels)
    expected = ForSequenceClassificationLoss(labels, logits, config)
    assert_close(loss_fn(logits, labels), expected)
    parts = [loss_fn(logits[rows], (labels[rows], torch.full((len(labels[rows]),), 2 / 4))) for rows in (slice(3), slice(3, 4))]
    assert_close(sum(parts) / 2, expected)
    total, count = loss_fn.totals(logits, (labels, torch.full((4,), 0.3)))
    assert_close(total / count, expected)


@pytest.mark.parametrize(
    ("num_labels", "problem", "labels"),
    [
        (1, None, torch.randn(3)),
        (3, "regression", torch.randn(3, 3)),
        (4, "multi_label_classification", torch.rand(3, 4).round()),
        (4, None, torch.tensor([3, 0, 2])),
    ],
)
def test_a_pipeline_has_the_loss_of_the_model(num_labels, problem, labels):
    config = tiny_config("bert")
    config.num_labels = num_labels
    model = AutoModelForSequenceClassification.from_config(config).eval()
    module = to_pipeline(model, num_stages=1, task=CLASSIFY, problem_type=problem).eval()
    model.config.problem_type = problem
    ids, mask = torch.randint(1, 60, (3, 7)), torch.tensor([[1] * 7, [1] * 4 + [0] * 3, [1] * 6 + [0]])
    expected = model(input_ids=ids, attention_mask=mask, labels=labels).loss
    assert_close(module.loss_fn(module((ids, mask)), labels), expected)
    assert_close(module.loss_fn(module((ids, mask)), (labels, torch.full((3,), 1 / 3))), expected)


@pytest.mark.parametrize(
    ("loss_fn", "labels", "match"),
    [
        (sequence_classification_loss, torch.zeros(4, 3), r'float32 \[4, 3\].*"regression" or "multi_label_classification"'),
        (sequence_classification_loss, torch.zeros(4, 1, dtype=torch.long), r"integers \[4\], got int64 \[4, 1\]"),
        (RegressionLoss(), torch.zeros(4), r"expected labels \[4, 3\], as the logits, got float32 \[4\]"),
        (MultiLabelLoss(), IDS, r"expected labels \[4, 3\], as the logits, got int64 \[4\]"),
    ],
)
def test_labels_of_another_shape(loss_fn, labels, match):
    """Broadcasting would hide some of them."""
    for given in (labels, (labels, torch.ones(4))):
        with pytest.raises(ValueError, match=match):
            loss_fn(torch.randn(4, 3), given)


def test_labels_that_are_no_pair():
    with pytest.raises(TypeError, match=r"a pair \(labels, weight\[batch\]\), got a tuple of length 3"):
        token_loss(torch.randn(1, 2, 3), (IDS, IDS, IDS))


def test_problems_without_a_default_loss():
    for task, options, match in (
        ("token-classification", {"num_labels": 1}, "two or more exclusive classes, got num_labels=1"),
        (CLASSIFY, {"num_labels": 1, "problem_type": "single_label_classification"}, "two or more exclusive classes"),
        (CLASSIFY, {"num_labels": 2, "problem_type": "ranking"}, "expected problem_type to be \"regression\" or .*'ranking'"),
    ):
        with pytest.raises(ValueError, match=match):
            default_loss(task, SimpleNamespace(**{"problem_type": None} | options))


def test_the_task_chooses():
    for task, expected in (("token-classification", token_loss), ("masked-lm", token_loss), ("causal-lm", causal_lm_loss)):
        assert default_loss(task, SimpleNamespace(num_labels=2, problem_type="regression")) is expected


@pytest.mark.parametrize("loss_fn", [TokenLoss(0.1), CausalLMLoss(0.1), SequenceClassificationLoss(0.1), RegressionLoss()])
def test_losses_survive_copying_and_pickling(loss_fn):
    assert copy.deepcopy(loss_fn) == loss_fn == pickle.loads(pickle.dumps(loss_fn))


@pytest.mark.parametrize(
    ("options", "loss_fn", "problem"),
    [
        ({"num_labels": 1}, RegressionLoss(), "regression"),
        ({"num_labels": 4, "problem_type": "multi_label_classification"}, MultiLabelLoss(), "multi_label_classification"),
        ({}, SequenceClassificationLoss(), None),
        ({"loss_fn": TokenLoss(0.1)}, TokenLoss(0.1), None),
    ],
)
def test_a_pipeline_gets_its_loss_and_the_exported_config_the_problem(options, loss_fn, problem):
    module = to_pipeline(tiny_config("bert"), num_stages=1, task=CLASSIFY, **options)
    assert module.loss_fn == loss_fn and type(module.loss_fn) is type(loss_fn)
    assert module.hf_config.problem_type == problem
    ids = torch.ones(2, 4, dtype=torch.long)
    assert module((ids, ids)).shape == (2, options.get("num_labels", 5))
