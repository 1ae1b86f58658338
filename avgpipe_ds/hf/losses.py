"""The default losses, in fp32, over a micro-batch of samples that carry weights.

Labels are `(labels, weight)` with fp32 `weight` `[batch]`, and the loss of a micro-batch is the *sum* over its samples of
`weight * sample_loss`. An engine averages the losses of the M micro-batches of a batch, so the data side decides what the
average means, whatever the sizes and lengths of the micro-batches:

- classification, `sample_loss` = cross entropy: `weight = M / samples of the pipeline's batch` gives the mean over samples;
- causal LM, `sample_loss` = *sum* of the cross entropies of the sample's target tokens:
  `weight = M / target tokens of the pipeline's batch` gives the mean over tokens, so a short micro-batch counts for less.

A weight of 0 makes a sample mere padding. Plain labels without a weight give the mean over the micro-batch, as in transformers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from avgpipe_ds.hf.tasks import Task

Labels = Tensor | tuple[Tensor, Tensor]
LossFn = Callable[[Tensor, Labels], Tensor]

IGNORED = -100  # transformers' label of a position without a target


def sequence_classification_loss(logits: Tensor, labels: Labels) -> Tensor:
    """Cross entropy of `logits` `[batch, num_labels]` against class ids int64 `[batch]`; a scalar."""
    if isinstance(labels, Tensor):
        return F.cross_entropy(logits.float(), labels)
    classes, weight = labels
    return (F.cross_entropy(logits.float(), classes, reduction="none") * weight).sum()


def token_loss(logits: Tensor, labels: Labels) -> Tensor:
    """Cross entropy of `logits` `[batch, length, classes]` against class ids int64 `[batch, length]`; a scalar.

    For token classification and masked language modelling. -100 is no target.
    """
    targets = labels if isinstance(labels, Tensor) else labels[0]
    reduction = "mean" if isinstance(labels, Tensor) else "none"
    losses = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction=reduction)
    if isinstance(labels, Tensor):
        return losses
    return (losses.view_as(targets).sum(dim=1) * labels[1]).sum()


def causal_lm_loss(logits: Tensor, labels: Labels) -> Tensor:
    """Cross entropy of `logits` `[batch, length, vocab]` against token ids int64 `[batch, length]`; a scalar.

    The labels are the input ids, not shifted: position t is scored against the label of t + 1. -100 is no target.
    """
    # Shifting the labels, not the logits, saves a copy of the largest tensor there is.
    if isinstance(labels, Tensor):
        return token_loss(logits, _shifted(labels))
    return token_loss(logits, (_shifted(labels[0]), labels[1]))


def _shifted(tokens: Tensor) -> Tensor:
    return F.pad(tokens, (0, 1), value=IGNORED)[:, 1:]


DEFAULT_LOSSES: dict[Task, LossFn] = {
    "sequence-classification": sequence_classification_loss,
    "token-classification": token_loss,
    "masked-lm": token_loss,
    "causal-lm": causal_lm_loss,
}
