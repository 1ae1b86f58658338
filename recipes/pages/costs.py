"""Tables of what `costs.py` found."""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path

from common.medians import median_interval

from pages.markdown import spread, table

__all__ = ["costs"]

MIB = 1024**2


def costs(files: list[Path]) -> str:
    """What N pipelines cost beside their computation, on each stage.

    In brackets are the extremes; behind "slower with one by" is the interval that holds the median with a probability of 95 %.
    """
    (file,) = files
    by_rank = json.loads(file.read_text())["ranks"]
    columns = [
        "N",
        "stage",
        "s per iteration",
        "executor, ms per instruction",
        "averaging",
        "recording a timeline",
        "slower with one by",
        "memory, MiB",
    ]
    rows = [
        [
            str(found["num_pipelines"]),
            str(found["stage"]),
            f"{found['iteration_s']:.3f}",
            _spread(found["executor_ms"], ".2f"),
            _spread(found["averaging_share"], ".1%"),
            _spread(found["tracing_share"], ".2%"),
            spread(*median_interval(found["tracing_slowdown"]), ".1%"),
            f"{sum(found['memory'].values()) / MIB:.0f}",
        ]
        for of_one_number in zip(*by_rank, strict=True)
        for found in of_one_number
    ]
    return table(columns, rows)


def _spread(values: Sequence[float], style: str) -> str:
    return spread(statistics.median(values), min(values), max(values), style)
