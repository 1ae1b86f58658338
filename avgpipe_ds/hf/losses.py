"""The default losses, in fp32, over a micro-batch of samples that carry weights.

Labels are `(labels, weight)` with fp32 `weight` `[batch]`, and the loss of a micro-batch is the *sum* over its samples of
`weight * sample_loss`. An engine averages the losses of the M micro-batches of a batch, so the data side decides what the
average means, whatever the sizes and lengths of the micro-batches:

- sequences, `sample_loss` = cross entropy, or the mean over the labels of squared error or binary cross entropy:
  `weight = M / samples of the pipeline's batch` gives the mean over samples;
- tokens, `sample_loss` = *sum* of the cross entropies of the sample's target tokens:
  `weight = M / target tokens of the pipeline's batch` gives the mean over tokens, so a short micro-batch counts for less.

A weight of 0 makes a sample mere padding. Plain labels without a weight give the mean over the micro-batch, as in transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from avgpipe_ds.hf.tasks import Task
from avgpipe_ds.weighted_loss import Labels, SampleLosses, WeightedLoss

__all__ = [
    "IGNORED",
    "CausalLMLoss",
    "Labels",
    "MultiLabelLoss",
    "ProblemType",
    "RegressionLoss",
    "SequenceClassificationLoss",
    "TokenLoss",
    "WeightedLoss",
    "causal_lm_loss",
    "default_loss",
    "problem_of",
    "sequence_classification_loss",
    "token_loss",
]

ProblemType = Literal["regression", "single_label_classification", "multi_label_classification"]
"""What transformers' `config.problem_type` says of the labels of a sequence."""

IGNORED = -100  # transformers' label of a position without a target


@dataclass(frozen=True)
class _CrossEntropy(WeightedLoss):
    """Cross entropy against class ids.

    Attributes:
        label_smoothing: from 0 to below 1: this share of each target is spread evenly over all classes, as in torch.

    """

    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing must be from 0 to below 1, got {self.label_smoothing}")

    def _losses(self, logits: Tensor, classes: Tensor) -> Tensor:
        """One by one: `logits` `[n, classes]`, `classes` `[n]`; 0 where there is no target."""
        return F.cross_entropy(
            logits.float(), classes, ignore_index=IGNORED, reduction="none", label_smoothing=self.label_smoothing
        )


@dataclass(frozen=True)
class SequenceClassificationLoss(_CrossEntropy):
    """Cross entropy of `logits` `[batch, num_labels]` against class ids int64 `[batch]`; -100 is no target."""

    def of_samples(self, outputs: Tensor, targets: Tensor) -> SampleLosses:
        """See `WeightedLoss.of_samples`.

        Raises:
            ValueError: the labels are no class ids.

        """
        if targets.is_floating_point() or targets.shape != outputs.shape[:1]:
            raise ValueError(
                f"expected one class id per sample, integers {list(outputs.shape[:1])}, got {_described(targets)}: for numbers "
                f"or several classes per sample, say problem_type={_quoted('regression', 'multi_label_classification')}"
            )
        return SampleLosses(self._losses(outputs, targets), (targets != IGNORED).float())


@dataclass(frozen=True)
class TokenLoss(_CrossEntropy):
    """Cross entropy of `logits` `[batch, length, classes]` against class ids int64 `[batch, length]`; -100 is no target.

    For token classification and masked language modelling.
    """

    def of_samples(self, outputs: Tensor, targets: Tensor) -> SampleLosses:
        """See `WeightedLoss.of_samples`."""
        losses = self._losses(outputs.flatten(0, 1), targets.flatten()).view_as(targets)
        return SampleLosses(losses.sum(dim=1), (targets != IGNORED).sum(dim=1).float())


@dataclass(frozen=True)
class CausalLMLoss(TokenLoss):
    """Cross entropy of `logits` `[batch, length, vocab]` against token ids int64 `[batch, length]`; -100 is no target.

    The labels are the input ids, not shifted: position t is scored against the label of t + 1.
    """

    def of_samples(self, outputs: Tensor, targets: Tensor) -> SampleLosses:
        """See `WeightedLoss.of_samples`."""
        # Shifting the labels, not the logits, saves a copy of the largest tensor there is.
        return super().of_samples(outputs, F.pad(targets, (0, 1), value=IGNORED)[:, 1:])


@dataclass(frozen=True)
class RegressionLoss(WeightedLoss):
    """Squared error of `logits` `[batch, num_labels]` against numbers of that shape; mean over labels.

    For one label the numbers may be `[batch]`, too.
    """

    def of_samples(self, outputs: Tensor, targets: Tensor) -> SampleLosses:
        """See `WeightedLoss.of_samples`."""
        return _mean_over_labels(F.mse_loss(outputs.float(), _fitting(targets, outputs), reduction="none"))


@dataclass(frozen=True)
class MultiLabelLoss(WeightedLoss):
    """Binary cross entropy of `logits` `[batch, num_labels]` against 0 or 1 of that shape; mean over labels."""

    def of_samples(self, outputs: Tensor, targets: Tensor) -> SampleLosses:
        """See `WeightedLoss.of_samples`."""
        return _mean_over_labels(
            F.binary_cross_entropy_with_logits(outputs.float(), _fitting(targets, outputs), reduction="none")
        )


causal_lm_loss = CausalLMLoss()
sequence_classification_loss = SequenceClassificationLoss()
token_loss = TokenLoss()

_BY_PROBLEM: dict[ProblemType, WeightedLoss] = {
    "regression": RegressionLoss(),
    "single_label_classification": sequence_classification_loss,
    "multi_label_classification": MultiLabelLoss(),
}
_BY_TASK: dict[Task, WeightedLoss] = {"token-classification": token_loss, "masked-lm": token_loss, "causal-lm": causal_lm_loss}


def default_loss(task: Task, config: Any) -> WeightedLoss:
    """What transformers would train this task with.

    Args:
        task: what the model is for.
        config: of the model; `num_labels` and `problem_type` say what the labels of a sequence are.

    Raises:
        ValueError: there are not two classes to tell apart, or the problem is none that transformers knows.

    """
    exclusive = task == "token-classification"
    if task == "sequence-classification":
        exclusive = problem_of(config) == "single_label_classification"
    if exclusive and config.num_labels < 2:
        raise ValueError(f"a classification needs two or more exclusive classes, got num_labels={config.num_labels}")
    return _BY_PROBLEM[problem_of(config)] if task == "sequence-classification" else _BY_TASK[task]


def problem_of(config: Any) -> ProblemType:
    """What the labels of a sequence are: `config.problem_type`, and where that is open, numbers for one label and else classes.

    Raises:
        ValueError: it is none that transformers knows.

    """
    problem: ProblemType = config.problem_type or ("regression" if config.num_labels == 1 else "single_label_classification")
    if problem not in get_args(ProblemType):
        raise ValueError(f"expected problem_type to be {_quoted(*get_args(ProblemType))}, got {problem!r}")
    return problem


def _fitting(targets: Tensor, logits: Tensor) -> Tensor:
    """Targets in fp32 and in the shape of the logits: a shape that merely broadcasts would train nonsense.

    Raises:
        ValueError: they have another shape.

    """
    if targets.shape != logits.shape and not (logits.shape == (len(targets), 1) and targets.dim() == 1):
        raise ValueError(f"expected labels {list(logits.shape)}, as the logits, got {_described(targets)}")
    return targets.to(torch.float32).view(logits.shape)


def _mean_over_labels(losses: Tensor) -> SampleLosses:
    return SampleLosses(losses.mean(dim=1), torch.ones(len(losses), device=losses.device))


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _quoted(*names: str) -> str:
    return " or ".join(f'"{name}"' for name in names)
