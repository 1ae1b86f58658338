"""Looks on while a stage's layers run one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from avgpipe_ds import deepspeed_compat as compat
from avgpipe_ds.deepspeed_compat.watch import watched
from avgpipe_ds.execution.tensors import as_tuple
from avgpipe_ds.preflight.data import lost_samples
from avgpipe_ds.preflight.graph import nodes_of, reaches
from avgpipe_ds.preflight.names import Names
from avgpipe_ds.preflight.report import LayerRow, Problem, Severity, Value
from avgpipe_ds.tuning.sample import device_time_s

__all__ = ["Observer", "is_finite"]


class Observer:
    """Notes down what the layers of a stage do, and what is wrong with it.

    Args:
        module: of the stage.
        device: where it computes.

    Attributes:
        names: of layers and parameters.
        rows: of the layers that ran.
        problems: that were found.
        where: the layer that runs, or ran last.

    """

    def __init__(self, module: compat.PipelineModule, device: torch.device) -> None:
        self._module, self._device = module, device
        self.names = Names(module)
        self.rows: list[LayerRow] = []
        self.problems: list[Problem] = []
        self.where = f"stage {module.stage_id}"
        self._samples: int | None = None

    def report(self, severity: Severity, text: str, *, where: str | None = None) -> None:
        """A problem, of the present layer unless it is said where."""
        self.problems.append(Problem(severity=severity, where=where or self.where, text=text))

    @contextmanager
    def watching(self, samples: int | None) -> Iterator[None]:
        """Inside the block, forwards of the module are watched.

        Args:
            samples: of the micro-batch; None if nobody knows.

        """
        self._samples = samples
        with watched(self._module, self._around), self._checked_embeddings():
            yield

    @property
    def samples(self) -> int | None:
        """Of the micro-batch; None if nobody knows, or once a layer has lost them."""
        return self._samples

    def place(self, number: int, function: Callable[[Any], Any]) -> str:
        """How a layer is named to users."""
        path = self.names.path(function)
        return f"stage {self._module.stage_id}, layer {number} ({compat.name_of(function)}{f', {path}' if path else ''})"

    def _around(self, number: int, function: Callable[[Any], Any], inputs: Any) -> Any:
        weights = compat.weights_of(function)
        row = LayerRow(
            stage_id=self._module.stage_id,
            number=number,
            name=compat.name_of(function),
            path=self.names.path(function),
            inputs=tuple(map(Value.of, as_tuple(inputs))),
            trainable=sum(weight.numel() for weight in weights if weight.requires_grad),
            frozen=sum(weight.numel() for weight in weights if not weight.requires_grad),
        )
        self.where = self.place(number, function)
        # Before the call, for a layer may work in place.
        came, finite = nodes_of(as_tuple(inputs)), all(map(_fit, as_tuple(inputs)))
        self.rows.append(row)
        start = device_time_s(self._device)
        outputs = function(inputs)
        seconds = device_time_s(self._device) - start
        self.rows[-1] = replace(row, outputs=tuple(map(Value.of, as_tuple(outputs))), seconds=seconds)
        if finite and all(map(is_finite, weights)):  # those that are not were named before
            self._check_finite(as_tuple(outputs))
        has_tensors = any(isinstance(value, Tensor) for value in as_tuple(outputs))  # else they are inside of something
        if came and has_tensors and not reaches(as_tuple(outputs), came):
            self.report(
                "error",
                "its output does not depend on its input for autograd, so no layer before it learns: is there a detach(), a"
                " no_grad(), or a conversion to integers or numpy in it?",
            )
        self._check_samples(as_tuple(inputs), as_tuple(outputs))
        return outputs

    def _check_finite(self, outputs: Sequence[Any]) -> None:
        for position, value in enumerate(outputs):
            if not _fit(value):
                bad = int((~torch.isfinite(value)).sum())
                self.report(
                    "error", f"{bad} of {value.numel()} numbers in its output {position} are not finite, those in its input are"
                )

    def _check_samples(self, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> None:
        is_scalar = len(outputs) == 1 and isinstance(outputs[0], Tensor) and not outputs[0].dim()
        if self._samples is None or is_scalar or not lost_samples(self._samples, inputs, outputs):
            return
        found = ", ".join(map(str, self.rows[-1].outputs))
        self.report("warning", f"{self._samples} samples come in, what goes out has no dimension for them: {found}")
        self._samples = None

    @contextmanager
    def _checked_embeddings(self) -> Iterator[None]:
        """Torch says "index out of range in self", and on a GPU ends the process."""
        embeddings = [module for module in self._module.modules() if isinstance(module, nn.Embedding)]
        hooks = [
            module.register_forward_pre_hook(partial(_check_index, self.names.parameter(module.weight))) for module in embeddings
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def is_finite(value: Any, *, is_mask: bool = False) -> bool:
    """Whether all numbers of a tensor are; of anything else, yes. Masks may hold infinity."""
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return True
    return not bool(torch.isnan(value).any()) if is_mask else bool(torch.isfinite(value).all())


def _fit(value: Any) -> bool:
    """Whether it is fit to go on with: what wants no gradient may be a mask."""
    return is_finite(value, is_mask=isinstance(value, Tensor) and not value.requires_grad)


def _check_index(name: str, module: nn.Embedding, arguments: tuple[Any, ...]) -> None:
    """Before an embedding looks anything up.

    Raises:
        IndexError: it has no such row.

    """
    if not arguments or not isinstance(arguments[0], Tensor) or not arguments[0].numel():
        return
    low, high = arguments[0].min().item(), arguments[0].max().item()
    if low < 0 or high >= module.num_embeddings:
        raise IndexError(
            f"{name} has the rows 0 to {module.num_embeddings - 1}, asked for are {low} to {high}: are the ids those of this"
            " model's tokenizer, and sequences no longer than it has positions?"
        )
