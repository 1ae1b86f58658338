"""Reads the traces that the ranks of one run wrote, on one clock."""

from __future__ import annotations

from pathlib import Path

from avgpipe_ds.report.clocks import on_one_clock
from avgpipe_ds.tracing.chrome import file_name, read
from avgpipe_ds.tracing.spans import StageTrace

__all__ = ["common_window", "load"]


def load(directory: Path) -> list[StageTrace]:
    """The traces of all ranks in rank order, their clocks put right.

    Raises:
        ValueError: there are none, some are missing, or they are of different runs.

    """
    first = directory / file_name(0)
    if not first.is_file():
        raise ValueError(
            f'there is no {first}: train with "avgpipe": {{"trace": "{directory}"}} in the configuration until it is '
            "written, which is after 6 iterations by default"
        )
    traces = read(first)
    missing = [name for name in map(file_name, range(1, traces[0].num_ranks)) if not (directory / name).is_file()]
    if missing:
        raise ValueError(f"{directory} lacks {', '.join(missing)}: copy what the other machines have written into one folder")
    for rank in range(1, traces[0].num_ranks):
        traces += read(directory / file_name(rank))
    if len({(one.run, one.num_ranks, one.num_pipelines) for one in traces}) > 1 or [one.rank for one in traces] != list(
        range(traces[0].num_ranks)
    ):
        raise ValueError(f"the traces in {directory} are of different runs: empty the folder and train again")
    traces = on_one_clock(traces)
    common_window(traces)
    return traces


def common_window(traces: list[StageTrace]) -> tuple[int, int]:
    """The time that all traces cover, in ns.

    Raises:
        ValueError: there is none.

    """
    start, end = max(trace.window_ns[0] for trace in traces), min(trace.window_ns[1] for trace in traces)
    if end <= start:
        raise ValueError("the traces have no time in common: they are of different runs, empty the folder and train again")
    return start, end
