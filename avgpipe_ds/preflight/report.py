"""What a check before training found: the same on every rank."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError
from torch import Tensor

from avgpipe_ds.atomic import replacing
from avgpipe_ds.errors import AvgPipeError

__all__ = ["Comparison", "LayerRow", "PreflightError", "Problem", "Report", "Severity", "Value"]

Severity = Literal["error", "warning"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """What goes into a layer or comes out of it.

    Attributes:
        kind: dtype of a tensor, such as "float32"; the class of anything else.
        shape: of a tensor; None for anything else.
        requires_grad: whether a gradient comes back for it.

    """

    kind: str
    shape: tuple[int, ...] | None = None
    requires_grad: bool = False

    @classmethod
    def of(cls, value: Any) -> Value:
        """Describe anything."""
        if not isinstance(value, Tensor):
            return cls(kind=type(value).__name__)
        return cls(kind=str(value.dtype).removeprefix("torch."), shape=tuple(value.shape), requires_grad=value.requires_grad)

    def __str__(self) -> str:
        shape = "" if self.shape is None else f"[{', '.join(map(str, self.shape))}]"
        return f"{self.kind}{shape}{'*' if self.requires_grad else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRow:
    """One layer, as the micro-batch went through it.

    Attributes:
        stage_id, number: k, and the layer's place in the whole model.
        name: its class.
        path: what transformers calls it; empty for other models.
        inputs, outputs: no outputs: it raised.
        trainable, frozen: parameters, counted by elements.
        seconds: of its forward, the first ever, so with all that is done only once.

    """

    stage_id: int
    number: int
    name: str
    path: str = ""
    inputs: tuple[Value, ...] = ()
    outputs: tuple[Value, ...] = ()
    trainable: int = 0
    frozen: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Something that breaks the training, or probably was not meant.

    Attributes:
        severity: "error": training hangs, breaks or learns nothing; "warning": it goes on.
        where: stage and layer, or what of the data.
        text: what was found, and what to do.

    """

    severity: Severity
    where: str
    text: str

    def __str__(self) -> str:
        return f"{self.where}: {self.text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The micro-batch in the pipeline and in transformers' own model on one process, both without dropout.

    Attributes:
        loss, whole_loss: of the pipeline, and of the whole model.
        norm, whole_norm: of all gradients; a tied weight counts once.
        tolerance: relative difference from which they are not the same; None: no verdict, for the precision is low.

    """

    loss: float
    whole_loss: float
    norm: float
    whole_norm: float
    tolerance: float | None

    @property
    def loss_difference(self) -> float:
        """Relative."""
        return _relative(self.loss, self.whole_loss)

    @property
    def norm_difference(self) -> float:
        """Relative."""
        return _relative(self.norm, self.whole_norm)

    @property
    def same(self) -> bool:
        """Whether both differences are within the tolerance; True without one."""
        worst = max(self.loss_difference, self.norm_difference)
        return self.tolerance is None or worst <= self.tolerance


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All of it.

    Attributes:
        rows: the layers of all stages that the micro-batch came to, in order; of the first data-parallel replica.
        problems: errors first; of all replicas.
        loss, gradient_norm: of the micro-batch in training mode; None where an error came before them.
        comparison: with the whole model.
        note: why there is no comparison.

    """

    __pydantic_config__ = ConfigDict(ser_json_inf_nan="strings")

    rows: tuple[LayerRow, ...]
    problems: tuple[Problem, ...]
    loss: float | None = None
    gradient_norm: float | None = None
    comparison: Comparison | None = None
    note: str = ""

    @property
    def errors(self) -> tuple[Problem, ...]:
        """Problems that break the training."""
        return tuple(problem for problem in self.problems if problem.severity == "error")

    @property
    def warnings(self) -> tuple[Problem, ...]:
        """The others."""
        return tuple(problem for problem in self.problems if problem.severity == "warning")

    def save(self, file: Path) -> None:
        """Write it as JSON, all or nothing."""
        with replacing(file) as part:
            part.write_bytes(TypeAdapter(Report).dump_json(self, indent=2) + b"\n")

    @classmethod
    def load(cls, file: Path) -> Report:
        """Read what `save` wrote.

        Raises:
            AvgPipeError: it is no such file.

        """
        try:
            return TypeAdapter(cls).validate_json(file.read_bytes())
        except (OSError, ValidationError) as error:
            raise AvgPipeError(f"{file} is no report of a check: {error}") from error


class PreflightError(AvgPipeError):
    """The check before training found errors; raised on every rank.

    Args:
        report: all that was found.

    """

    def __init__(self, report: Report) -> None:
        lines = "\n".join(f"  {problem}" for problem in report.errors)
        super().__init__(f"the check before training found {len(report.errors)} error(s):\n{lines}")
        self.report = report

    def __reduce__(self) -> tuple[type[PreflightError], tuple[Report]]:
        # The default would call the constructor with the finished message as its only argument.
        return type(self), (self.report,)


def _relative(mine: float, theirs: float) -> float:
    if not (math.isfinite(mine) and math.isfinite(theirs)):
        return math.inf
    return abs(mine - theirs) / max(abs(mine), abs(theirs), 1e-12)
