"""What training needs of each accelerator's memory, measured beside predicted."""

from __future__ import annotations

import io
from dataclasses import dataclass, fields

from rich.console import Console
from rich.table import Table

from avgpipe_ds.memory.breakdown import Breakdown, largest

__all__ = ["MemoryReport", "StageMemory"]

_MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """One stage of one data-parallel replica.

    Attributes:
        rank, stage_id: which one.
        measured: of what exists, and of what autograd kept in the iterations that were measured.
        predicted: from one pipeline, one micro-batch and the schedule, as tuning predicts other settings.

    """

    rank: int
    stage_id: int
    measured: Breakdown
    predicted: Breakdown


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """All stages, by rank; printed as a table in MiB."""

    stages: tuple[StageMemory, ...]

    @property
    def peak_bytes(self) -> int:
        """Measured, of the stage that needs most."""
        return largest(stage.measured for stage in self.stages)

    def __str__(self) -> str:
        table = Table(title="memory in MiB: measured / predicted", title_justify="left")
        kinds = [field.name for field in fields(Breakdown)] + ["total"]
        for column in ("rank", "stage", *kinds):
            table.add_column(column, justify="right")
        for stage in self.stages:
            pairs = ((getattr(stage.measured, kind), getattr(stage.predicted, kind)) for kind in kinds)
            cells = (f"{measured / _MIB:.1f} / {predicted / _MIB:.1f}" for measured, predicted in pairs)
            table.add_row(str(stage.rank), str(stage.stage_id), *cells)
        text = io.StringIO()
        Console(file=text, width=140).print(table)
        return text.getvalue().rstrip()
