"""The results as a table for people."""

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from avgpipe_ds.memory.breakdown import largest
from bench.measure import Row
from bench.workload import Workload

__all__ = ["print_results"]


def print_results(workload: Workload, rows: Sequence[Row], left_out: Mapping[str, str]) -> None:
    """Print the rows, then who was left out and why."""
    title = f"{workload.mode}, K = {workload.num_stages}, B = {workload.batch}, clipping {workload.clipping:g}"
    table = Table(title=title, caption="medians; a batch is B samples; memory of the rank that needs most")
    emulated = workload.mode == "emulated"
    columns = ["M", "s per batch", "speed-up", "min .. max", "samples/s", *(["ideal s", "busy"] if emulated else []), "MB"]
    table.add_column("engine", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(row.contender.name, *_cells(workload, row, emulated))
    console = Console(width=120)
    console.print(table)
    for name, reason in left_out.items():
        console.print(f"left out: {name}: {reason}", highlight=False)


def _cells(workload: Workload, row: Row, emulated: bool) -> list[str]:
    cells = [str(row.num_micro_batches), f"{row.median_s:.4f}", f"{row.median_speedup:.3f}"]
    cells += [f"{min(row.speedups):.3f} .. {max(row.speedups):.3f}", f"{workload.batch / row.median_s:.1f}"]
    if emulated:
        ideal_s = row.contender.compute_s(workload, row.num_micro_batches)
        cells += [f"{ideal_s:.4f}", f"{ideal_s / row.median_s:.0%}"]
    return [*cells, f"{largest(row.memory) / 1e6:.2f}"]
