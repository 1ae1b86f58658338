"""Tables of what `costs.py` found."""

import json
from pathlib import Path

from common.medians import median_extremes, median_interval

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
            spread(*median_extremes(found["executor_ms"]), ".2f"),
            spread(*median_extremes(found["averaging_share"]), ".1%"),
            spread(*median_extremes(found["tracing_share"]), ".2%"),
            spread(*median_interval(found["tracing_slowdown"]), ".1%"),
            f"{sum(found['memory'].values()) / MIB:.0f}",
        ]
        for of_one_number in zip(*by_rank, strict=True)
        for found in of_one_number
    ]
    return table(columns, rows)
