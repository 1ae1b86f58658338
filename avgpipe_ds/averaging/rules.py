"""Averaging rules: how N parallel models and their reference model pull at each other (paper, section 3.2).

A rule is called around the optimizer steps of one stage, and sees nothing but lists of tensors. That makes it independent of the
optimizer, of precision and of how the model is partitioned; and since a stage holds its shard of all N models and of the
reference, no rule ever communicates.

Every pull reads the reference z of the PREVIOUS iteration. So the result does not depend on when the pipelines step relative to
each other, and no pipeline waits for another one. The sums do depend on the order of the steps in their last bits: the caller
steps pipelines 0 .. N-1 in order, which makes results bitwise reproducible.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from avgpipe_ds.config import AveragingConfig

__all__ = ["AveragingRule", "AvgPipeRule", "EASGDRule", "SMARule", "make_rule"]


class AveragingRule(ABC):
    """Holds the reference weights of one stage and updates them and the parallel models, in place.

    Per iteration and pipeline: `before_step`, the optimizer, `after_step`; after all N pipelines, `finish_iteration`. The two may
    come once for all weights or once per parameter group, but the steps of two pipelines must not interleave. A pipeline that
    skips its step (fp16 overflow) is announced all the same, with unchanged weights: a zero update.

    Args:
        alpha: how far a parallel model is pulled to the reference in one iteration, in (0, 1].
        num_pipelines: N, at least 2.
        momentum: of the reference, in [0, 1).

    Attributes:
        alpha, num_pipelines, momentum: as given.
        reference: z, one fp32 tensor per weight; valid whenever no iteration is under way.

    """

    name: ClassVar[str]

    def __init__(self, *, alpha: float, num_pipelines: int, momentum: float = 0.0) -> None:
        if not 0 < alpha <= 1:
            raise ValueError(f"alpha must be in (0, 1], got {alpha}")
        if num_pipelines < 2:
            raise ValueError(f"averaging needs at least 2 pipelines, got {num_pipelines}")
        self.alpha = alpha
        self.num_pipelines = num_pipelines
        self.momentum = momentum
        self.reference: list[Tensor] = []
        self._sum: list[Tensor] = []  # what the pipelines have contributed in this iteration
        self._summed: set[int] = set()  # the positions in it that have a contribution; elsewhere it holds an older iteration's
        self._velocity: list[Tensor] = []  # stays empty without momentum
        self._mid_iteration = False

    @torch.no_grad()
    def initialize(self, weights: Sequence[Tensor]) -> None:
        """Start the reference as a copy of `weights`; all parallel models must have these weights, too.

        Args:
            weights: master weights of one pipeline on this stage, all of them; their positions are the `indices` from now on.

        """
        self.reference = [weight.detach().to(torch.float32, copy=True) for weight in weights]
        self._sum = [torch.zeros_like(z) for z in self.reference]
        self._summed.clear()
        self._velocity = [torch.zeros_like(z) for z in self.reference] if self.has_momentum else []
        self._mid_iteration = False

    @torch.no_grad()
    def before_step(self, weights: Sequence[Tensor], indices: Sequence[int]) -> None:
        """Call just before the optimizer of one pipeline updates `weights`.

        Args:
            weights: master weights of that pipeline; any subset, such as one parameter group.
            indices: their positions in the list that `initialize` got.

        """
        self._mid_iteration = True
        if weights:  # fused operations refuse empty lists, and a stage may have nothing to train
            self._before_step(_as_fp32(weights), indices)

    @torch.no_grad()
    def after_step(self, weights: Sequence[Tensor], indices: Sequence[int]) -> None:
        """Call just after it: pulls `weights` to the reference and gives the reference its share. Arguments as `before_step`."""
        if not weights:
            return
        masters = _as_fp32(weights)
        self._after_step(masters, indices)
        if any(master is not weight for master, weight in zip(masters, weights, strict=True)):
            torch._foreach_copy_(list(weights), masters)

    @torch.no_grad()
    def finish_iteration(self) -> None:
        """Call when all N pipelines have stepped: updates the reference."""
        for index in set(range(len(self._sum))) - self._summed:
            self._sum[index].zero_()
        if self.reference:
            self._update_reference()
        self._summed.clear()
        self._mid_iteration = False

    @property
    def has_momentum(self) -> bool:
        """Whether the reference has a velocity, which takes as much memory as it does."""
        return self.momentum > 0

    def tensors(self) -> list[Tensor]:
        """Everything that it keeps between steps."""
        return [*self.reference, *self._sum, *self._velocity]

    def state_dict(self) -> dict[str, list[Tensor]]:
        """The state between two iterations: "reference" and "velocity", lists of fp32 tensors that are not copied.

        Raises:
            RuntimeError: an iteration is under way, so that the reference lacks steps that the parallel models have.

        """
        if self._mid_iteration:
            raise RuntimeError("the state of an averaging rule can be saved only between iterations")
        return {"reference": list(self.reference), "velocity": list(self._velocity)}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, list[Tensor]]) -> None:
        """Copy a saved state into this rule, which must have been initialized; velocity saved under another momentum is dropped.

        Raises:
            ValueError: the shapes are not those of this rule's reference.

        """
        expected, got = [z.shape for z in self.reference], [z.shape for z in state["reference"]]
        if got != expected:
            raise ValueError(f"expected reference weights of shapes {_shapes(expected)}, got {_shapes(got)}")
        pairs = list(zip(self.reference, state["reference"], strict=True))
        saved_velocity = state["velocity"] or [torch.zeros_like(v) for v in self._velocity]
        if self._velocity:
            pairs += zip(self._velocity, saved_velocity, strict=True)
        for target, source in pairs:
            target.copy_(source)
        self._summed.clear()
        self._mid_iteration = False

    def _contribute(self, values: Sequence[Tensor], indices: Sequence[int]) -> None:
        """Add to the sum. An iteration's first contribution overwrites it: memory traffic is all that averaging costs, and
        clearing would be another pass.
        """
        first = [place for place, index in enumerate(indices) if index not in self._summed]
        later = [place for place, index in enumerate(indices) if index in self._summed]
        if first:
            torch._foreach_copy_([self._sum[indices[place]] for place in first], [values[place] for place in first])
        if later:
            torch._foreach_add_([self._sum[indices[place]] for place in later], [values[place] for place in later])
        self._summed.update(indices)

    @abstractmethod
    def _before_step(self, weights: list[Tensor], indices: Sequence[int]) -> None: ...

    @abstractmethod
    def _after_step(self, weights: list[Tensor], indices: Sequence[int]) -> None: ...

    @abstractmethod
    def _update_reference(self) -> None: ...


class AvgPipeRule(AveragingRule):
    """The paper's rule: `w_i <- (1 - alpha) (w_i + u_i) + alpha z`, then `z <- z + outer_lr * mean_i(u_i)`.

    Works on local updates u_i, so it needs no copy of the weights from before the step: +w before and -w after it leave -u_i in
    the sum. Beyond the paper (which is `outer_lr` 1 without momentum) the mean update may pass through Nesterov momentum as in
    DiLoCo, as `torch.optim.SGD(nesterov=True)` has it: `v <- outer_momentum v + mean`, and `mean + outer_momentum v` is applied.

    Args:
        alpha: as `AveragingRule`.
        num_pipelines: as `AveragingRule`.
        outer_lr: factor on what the reference takes, above 0.
        outer_momentum: in [0, 1).

    """

    name = "avgpipe"

    def __init__(self, *, alpha: float, num_pipelines: int, outer_lr: float = 1.0, outer_momentum: float = 0.0) -> None:
        super().__init__(alpha=alpha, num_pipelines=num_pipelines, momentum=outer_momentum)
        self.outer_lr = outer_lr

    def _before_step(self, weights: list[Tensor], indices: Sequence[int]) -> None:
        self._contribute(weights, indices)

    def _after_step(self, weights: list[Tensor], indices: Sequence[int]) -> None:
        torch._foreach_sub_(_pick(self._sum, indices), weights)
        torch._foreach_lerp_(weights, _pick(self.reference, indices), self.alpha)

    def _update_reference(self) -> None:
        if self.has_momentum:
            torch._foreach_mul_(self._velocity, self.momentum)
            torch._foreach_add_(self._velocity, self._sum, alpha=-1 / self.num_pipelines)
            torch._foreach_add_(self.reference, self._velocity, alpha=self.outer_lr * self.momentum)
        torch._foreach_add_(self.reference, self._sum, alpha=-self.outer_lr / self.num_pipelines)


class EASGDRule(AveragingRule):
    """EASGD (Zhang, Choromanska, LeCun, NeurIPS 2015): `c_i = alpha (w_i - z)`, `w_i <- w_i + u_i - c_i`, `z <- z + sum_i c_i`.

    c_i is taken of w_i without u_i: it is computed before the step and kept until after it. Momentum is for `SMARule`.
    """

    name = "easgd"

    def __init__(self, *, alpha: float, num_pipelines: int, momentum: float = 0.0) -> None:
        super().__init__(alpha=alpha, num_pipelines=num_pipelines, momentum=momentum)
        self._corrections: dict[int, Tensor] = {}  # c_i of the pipeline that is stepping, by index; empty between steps

    def _before_step(self, weights: list[Tensor], indices: Sequence[int]) -> None:
        corrections = torch._foreach_sub(weights, _pick(self.reference, indices))
        torch._foreach_mul_(corrections, self.alpha)
        self._corrections.update(zip(indices, corrections, strict=True))

    def _after_step(self, weights: list[Tensor], indices: Sequence[int]) -> None:
        corrections = [self._corrections.pop(index) for index in indices]
        torch._foreach_sub_(weights, corrections)
        self._contribute(corrections, indices)

    def _update_reference(self) -> None:
        torch._foreach_add_(self.reference, self._sum)


class SMARule(EASGDRule):
    """SMA (Crossbow; Koliousis et al., VLDB 2019): EASGD whose reference has momentum, `z <- z + sum_i c_i + mu (z - z_prev)`.

    Args:
        alpha: as `AveragingRule`.
        num_pipelines: as `AveragingRule`.
        momentum: mu, in [0, 1).

    """

    name = "sma"

    def _update_reference(self) -> None:
        if self.has_momentum:
            # The velocity is z - z_prev: what the reference moved in the last iteration.
            torch._foreach_mul_(self._velocity, self.momentum)
            torch._foreach_add_(self._velocity, self._sum)
            torch._foreach_add_(self.reference, self._velocity)
        else:
            super()._update_reference()


def make_rule(config: AveragingConfig, num_pipelines: int) -> AveragingRule:
    """The rule that the configuration asks for, not yet initialized.

    Args:
        config: the "averaging" section.
        num_pipelines: N, at least 2: a single pipeline has nothing to average with and is plain DeepSpeed.

    Raises:
        ValueError: `num_pipelines` is below 2.

    """
    alpha = config.alpha_for(num_pipelines)
    if config.rule == "easgd":
        return EASGDRule(alpha=alpha, num_pipelines=num_pipelines)
    if config.rule == "sma":
        return SMARule(alpha=alpha, num_pipelines=num_pipelines, momentum=config.momentum)
    return AvgPipeRule(alpha=alpha, num_pipelines=num_pipelines, outer_lr=config.outer_lr, outer_momentum=config.outer_momentum)


def _as_fp32(weights: Sequence[Tensor]) -> list[Tensor]:
    """The weights themselves where they are fp32, as master weights are; else copies."""
    return [weight.to(torch.float32) for weight in weights]


def _pick(tensors: list[Tensor], indices: Sequence[int]) -> list[Tensor]:
    return [tensors[index] for index in indices]


def _shapes(shapes: list[torch.Size]) -> str:
    return str([tuple(shape) for shape in shapes])
