"""However a batch is cut into micro-batches and padded, its loss and gradients are those of one process without either."""

import random

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertForTokenClassification,
    GPT2Config,
    GPT2LMHeadModel,
    set_seed,
)

from avgpipe_ds.data import BatchShape, Collate, Sample, TrainingBatches, evaluation_batches
from avgpipe_ds.data.sampler import epoch_order

VOCABULARY, CLASSES = 50, 3


def samples_of(task, number):
    """Samples of 5 to 200 tokens, both ends of that range included."""
    draw = random.Random(task)
    lengths = [5, 200, *(draw.randint(5, 200) for _ in range(number - 2))]
    made = []
    for length in lengths:
        ids = [draw.randrange(1, VOCABULARY) for _ in range(length)]
        if task == "sequence":
            made.append(Sample(ids, draw.randrange(CLASSES), 1))
        elif task == "causal":
            made.append(Sample(ids, None, length - 1))
        elif task == "chat":
            labels = [-100] * (length // 2) + ids[length // 2 :]
            made.append(Sample(ids, labels, length - length // 2))
        else:
            limit = CLASSES if task == "token" else VOCABULARY
            labels = [draw.randrange(limit) if draw.random() < 0.3 else -100 for _ in ids[1:]]
            labels = [draw.randrange(limit), *labels]
            made.append(Sample(ids, labels, sum(label != -100 for label in labels)))
    return made


def model_of(task):
    set_seed(0)
    small = {"vocab_size": VOCABULARY, "num_labels": CLASSES}
    if task in ("causal", "chat"):
        model = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=256, **small))
    else:
        kind = {"sequence": BertForSequenceClassification, "token": BertForTokenClassification, "masked": BertForMaskedLM}[task]
        config = BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, **small)
        model = kind(config)
    return model.double().eval()


def sample_losses(task, model, inputs, labels):
    """The summed loss of every sample of a micro-batch, as `avgpipe_ds.hf` counts it."""
    logits = model(input_ids=inputs[0], attention_mask=inputs[1]).logits
    if task == "sequence":
        return F.cross_entropy(logits, labels, reduction="none")
    if task in ("causal", "chat"):
        logits, labels = logits[:, :-1], labels[:, 1:]
    return F.cross_entropy(logits.transpose(1, 2), labels, reduction="none", ignore_index=-100).sum(dim=1)


def alone(task, model, samples):
    """The mean loss over the targets of samples that are run one by one, without padding; what training is to minimise."""
    losses, targets = [], 0
    for sample in samples:
        ids = torch.tensor([sample.input_ids])
        labels = torch.tensor([sample.labels]) if sample.labels is not None else ids
        losses.append(sample_losses(task, model, (ids, torch.ones_like(ids)), labels).sum())
        shifted = labels[:, 1:] if task in ("causal", "chat") else labels
        targets += int((shifted != -100).sum())
    return torch.stack(losses).sum() / targets


def gradient(loss, model):
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.cat([part.flatten() for part in torch.autograd.grad(loss, parameters, allow_unused=True) if part is not None])


@pytest.mark.parametrize("micro_batch_size", range(1, 9))
@pytest.mark.parametrize("task", ["sequence", "token", "masked", "causal", "chat"])
def test_weighted_losses_average_to_the_mean_over_targets(task, micro_batch_size):
    shape = BatchShape(num_pipelines=1, num_replicas=1, num_micro_batches=3, micro_batch_size=micro_batch_size)
    samples = samples_of(task, 2 * shape.samples_per_iteration + 1)  # the last batch has a single sample
    model = model_of(task)
    batches = TrainingBatches(samples, Collate(pad_token_id=0), shape, seed=1, epochs=1)
    order = epoch_order(len(samples), seed=1, epoch=0)
    for iteration in range(3):
        losses = []
        for _ in range(shape.num_micro_batches):
            inputs, (labels, weight) = next(batches)
            losses.append((sample_losses(task, model, inputs, labels) * weight).sum())
        start = iteration * shape.samples_per_iteration
        batch = [samples[number] for number in order[start : start + shape.samples_per_iteration]]
        assert len(batch) == (1 if iteration == 2 else shape.samples_per_iteration)
        mean, expected = torch.stack(losses).mean(), alone(task, model, batch)
        # Weights are fp32; everything else is fp64 here.
        assert mean.item() == pytest.approx(expected.item(), rel=1e-6)
        torch.testing.assert_close(gradient(mean, model), gradient(expected, model), rtol=1e-5, atol=1e-7)
    with pytest.raises(StopIteration):
        next(batches)


@pytest.mark.parametrize("group_by_length", [False, True])
def test_with_pipelines_and_replicas_each_pipeline_has_the_mean_of_its_own(group_by_length):
    shape = BatchShape(num_pipelines=2, num_replicas=2, num_micro_batches=2, micro_batch_size=3)
    samples, model = samples_of("causal", 25), model_of("causal")  # 24, and a last one that both pipelines train
    replicas = [
        TrainingBatches(samples, Collate(pad_token_id=0), shape, replica=replica, epochs=1, group_by_length=group_by_length)
        for replica in range(2)
    ]
    for _iteration in range(2):
        for _pipeline in range(2):
            losses, seen = [], []
            for _ in range(shape.num_micro_batches):
                for (ids, mask), (labels, weight) in map(next, replicas):
                    losses.append((sample_losses("causal", model, (ids, mask), labels) * weight).sum())
                    rows = [row for row in range(len(ids)) if weight[row] > 0]
                    seen += [Sample(ids[row][: mask[row].sum()].tolist(), None, 0) for row in rows]
            expected = alone("causal", model, seen)
            assert torch.stack(losses).mean().item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("task", ["sequence", "token", "causal"])
@pytest.mark.parametrize("num_replicas", [1, 3])
@torch.no_grad()
def test_evaluation_sums_to_the_mean_over_targets(task, num_replicas):
    samples, model = samples_of(task, 25), model_of(task)
    total = 0.0
    for replica in range(num_replicas):
        batches = evaluation_batches(
            samples, Collate(pad_token_id=0), micro_batch_size=8, replica=replica, num_replicas=num_replicas
        )
        for inputs, (labels, weight) in batches:
            total += (sample_losses(task, model, inputs, labels) * weight).sum().item()
    targets = sum(sample.num_targets for sample in samples)
    assert total / targets == pytest.approx(alone(task, model, samples).item(), rel=1e-6)
