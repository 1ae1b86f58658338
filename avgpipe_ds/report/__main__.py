"""`python -m avgpipe_ds.report DIRECTORY`: a picture of the timetable, and where each accelerator's time went."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from avgpipe_ds.report.load import load
from avgpipe_ds.report.shares import CATEGORIES, StageShares, shares_of
from avgpipe_ds.tracing.chrome import write


def main(arguments: list[str] | None = None) -> None:
    """Read the traces in a directory, and write trace.json, bubbles.json, timetable.png and timetable.svg beside them."""
    parser = argparse.ArgumentParser(prog="python -m avgpipe_ds.report", description=__doc__)
    parser.add_argument("directory", type=Path, help='the folder that "avgpipe": {"trace": ...} named')
    parser.add_argument("--iterations", type=int, default=2, help="iterations to draw")
    options = parser.parse_args(arguments)
    directory: Path = options.directory
    if options.iterations < 1:
        parser.error(f"--iterations must be at least 1, got {options.iterations}")
    try:
        traces = load(directory)
    except ValueError as error:
        parser.error(str(error))
    shares = shares_of(traces)
    Console(width=40 + 12 * len(traces)).print(_table(shares))
    merged, bubbles = directory / "trace.json", directory / "bubbles.json"
    write(merged, traces)
    bubbles.write_text(json.dumps([asdict(stage) for stage in shares], indent=2))
    print(f"{merged}: all ranks together, for ui.perfetto.dev or chrome://tracing")
    print(f"{bubbles}: the table above")
    try:
        from avgpipe_ds.report.picture import draw

        for file in draw(traces, directory, iterations=options.iterations):
            print(file)
    except ModuleNotFoundError as error:
        parser.exit(1, f"no picture: {error}; it needs `pip install matplotlib`\n")


def _table(shares: list[StageShares]) -> Table:
    table = Table(title=f"share of {shares[0].seconds:.3f} s")
    table.add_column("")
    for stage in shares:
        table.add_column(f"stage {stage.stage_id}\nrank {stage.rank}", justify="right")
    for category in CATEGORIES:
        table.add_row(category, *(f"{stage.shares[category]:.1%}" for stage in shares))
    return table


if __name__ == "__main__":
    main()
