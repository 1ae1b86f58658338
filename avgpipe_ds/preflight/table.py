"""A report as users read it."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table

from avgpipe_ds.preflight.report import LayerRow, Report, Value

__all__ = ["as_text", "verdict", "view"]

_TEXT_WIDTH = 130


def view(report: Report) -> RenderableType:
    """The layers, the comparison, and what is wrong."""
    return Group(*([_layers(report.rows)] if report.rows else []), *_lines(report))


def as_text(report: Report) -> str:
    """The same for a log."""
    console = Console(file=io.StringIO(), width=_TEXT_WIDTH, force_terminal=False)
    console.print(view(report))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def verdict(report: Report) -> str:
    """One line."""
    errors, warnings = len(report.errors), len(report.warnings)
    return f"{'failed' if errors else 'passed'}: {errors} error(s), {warnings} warning(s)"


def _layers(rows: Sequence[LayerRow]) -> Table:
    table = Table(title="one micro-batch, layer by layer", title_justify="left", caption="* a gradient comes back for it")
    for column in ("stage", "layer"):
        table.add_column(column, justify="right")
    for column in ("class", "in", "out"):
        table.add_column(column, overflow="fold")
    for column in ("trainable", "frozen", "ms"):
        table.add_column(column, justify="right")
    for _, stage in groupby(rows, key=lambda row: row.stage_id):
        for _, same in groupby(stage, key=_looks):
            table.add_row(*_cells(list(same)))
        table.add_section()
    return table


def _looks(row: LayerRow) -> tuple[object, ...]:
    """What rows that are shown as one have in common."""
    return row.name, row.inputs, row.outputs, row.trainable, row.frozen


def _cells(rows: Sequence[LayerRow]) -> list[str]:
    """One line of the table for layers that look alike; their times are added up, parameters are those of each."""
    first, last = rows[0], rows[-1]
    paths = dict.fromkeys(row.path for row in (first, last) if row.path)
    return [
        str(first.stage_id),
        str(first.number) if first is last else f"{first.number} - {last.number}",
        "\n".join([first.name, *paths]),
        _values(first.inputs),
        _values(first.outputs) or "-",
        f"{first.trainable:,}",
        f"{first.frozen:,}",
        f"{1e3 * sum(row.seconds for row in rows):.1f}",
    ]


def _values(values: Sequence[Value]) -> str:
    return escape("\n".join(map(str, values)))


def _lines(report: Report) -> Iterator[str]:
    if report.loss is not None:
        norm = "-" if report.gradient_norm is None else f"{report.gradient_norm:.6g}"
        yield f"loss {report.loss:.6g}, gradient norm over all stages {norm}"
    if report.comparison is not None:
        one = report.comparison
        yield (
            f"without dropout, here and in the unsplit model: loss {one.loss:.6g} and {one.whole_loss:.6g}"
            f" ({one.loss_difference:.1e} apart), gradient norm {one.norm:.6g} and {one.whole_norm:.6g}"
            f" ({one.norm_difference:.1e} apart)"
        )
    elif report.note:
        yield f"not compared with an unsplit model: {escape(report.note)}"
    colours = {"error": "bold red", "warning": "yellow"}
    for problem in report.problems:
        yield f"[{colours[problem.severity]}]{problem.severity}[/] {escape(str(problem))}"
    yield verdict(report)
