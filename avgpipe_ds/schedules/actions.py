"""One unit of computation of a schedule: the forward or the backward of one micro-batch on one stage.

Actions say what a stage computes and in which order, and nothing of communication: what has to be received and sent follows from
the position of the stage and is added when a plan is lowered to instructions.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

__all__ = ["Action", "Kind"]

Kind = Literal["F", "B"]
"""Forward or backward."""

# ASCII digits without leading zeros, so that parsing is the exact inverse of printing.
_TEXT = re.compile(r"([FAB])(0|[1-9][0-9]*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """The forward or backward of one micro-batch; prints as `F0`, `B0`, or `A0` for an advanced forward.

    Attributes:
        kind: "F" for a forward, "B" for a backward.
        micro_batch: index of the micro-batch in its batch, from 0.
        advanced: whether it is a forward that 1F1B would run only after this stage's first backward (paper, section 4).

    Raises:
        ValueError: `micro_batch` is negative, or a backward is marked as advanced.

    """

    kind: Kind
    micro_batch: int
    advanced: bool = False

    def __post_init__(self) -> None:
        if self.kind not in ("F", "B"):
            raise ValueError(f'kind must be "F" or "B", got {self.kind!r}')
        if self.micro_batch < 0:
            raise ValueError(f"micro_batch must be at least 0, got {self.micro_batch}")
        if self.advanced and self.kind == "B":
            raise ValueError(f"only a forward can be advanced, got the backward of micro-batch {self.micro_batch}")

    def __str__(self) -> str:
        return f"{'A' if self.advanced else self.kind}{self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Inverse of `str`.

        Raises:
            ValueError: `text` is not the text form of an action.

        """
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ValueError(f'expected an action such as "F0", "A0" or "B0", got {text!r}')
        letter, micro_batch = match.groups()
        return cls(kind="B" if letter == "B" else "F", micro_batch=int(micro_batch), advanced=letter == "A")
