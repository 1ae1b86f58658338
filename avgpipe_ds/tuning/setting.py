"""What is tuned: the number of pipelines, of micro-batches, and the advance."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from avgpipe_ds.schedules.plans import Plan, largest_advance, plan_all_stages

__all__ = ["Setting", "candidates"]


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Setting:
    """One choice of the three degrees.

    Attributes:
        num_pipelines: N.
        num_micro_batches: M.
        advance: a; 0 is 1F1B.

    """

    num_pipelines: int
    num_micro_batches: int
    advance: int = 0

    def __str__(self) -> str:
        order = f"advance {self.advance}" if self.advance else "1F1B"
        return f"N = {self.num_pipelines}, M = {self.num_micro_batches}, {order}"

    def plans(self, num_stages: int) -> tuple[Plan, ...]:
        """What each stage computes for a batch."""
        name = "advance_forward" if self.advance else "1f1b"
        return plan_all_stages(name, num_stages=num_stages, num_micro_batches=self.num_micro_batches, advance=self.advance)


def candidates(batch: int, *, num_stages: int, max_pipelines: int, max_advance: int) -> Iterator[Setting]:
    """All settings that divide the batch, each once: an advance that changes nothing is left out.

    Args:
        batch: B, samples that one pipeline trains on per optimizer step.
        num_stages: K.
        max_pipelines: the largest N.
        max_advance: the largest a.

    Raises:
        ValueError: a number is below 1, or `max_advance` below 0.

    """
    if min(batch, num_stages, max_pipelines) < 1 or max_advance < 0:
        raise ValueError(
            f"expected numbers from 1 and an advance from 0, got B = {batch}, K = {num_stages}, N = {max_pipelines},"
            f" a = {max_advance}"
        )
    for num_micro_batches in (number for number in range(1, batch + 1) if batch % number == 0):
        different = largest_advance(num_stages=num_stages, num_micro_batches=num_micro_batches)
        for advance in range(min(max_advance, different) + 1):
            for num_pipelines in range(1, max_pipelines + 1):
                yield Setting(num_pipelines=num_pipelines, num_micro_batches=num_micro_batches, advance=advance)
