"""The comparison as tables, and as JSON."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from common.errors import RecipeError
from rich.table import Table

from accuracy.analysis import BASE, Comparison
from accuracy.records import Conditions
from accuracy.settings import SETTINGS

__all__ = [
    "CONTENDERS",
    "as_json",
    "cells",
    "columns",
    "comparison_table",
    "read_speeds",
    "reference_table",
    "remarks",
    "time_ratio",
    "time_ratios",
]

#: Whose speed a setting has, by its name.
CONTENDERS = {setting.name: setting.contender for setting in SETTINGS}


def reference_table(accuracies: Mapping[float, float], target: float) -> Table:
    """Return what the reference reached, by learning rate, mean over the seeds."""
    table = Table(title=f"reference; target {target:.4f}", title_justify="left")
    table.add_column("learning rate", justify="right")
    table.add_column("accuracy at the end", justify="right")
    for rate, accuracy in accuracies.items():
        table.add_row(f"{rate:g}", f"{accuracy:.4f}")
    return table


def comparison_table(rows: Sequence[Comparison], speeds: Mapping[str, float]) -> Table:
    """Return samples to the target, "never" where it was not reached; with `speeds`, seconds per sample, also the time."""
    table = Table(
        title=f"to the target, median over the seeds (min .. max); ratios to {BASE}, paired by seed", title_justify="left"
    )
    for column in columns(speeds):
        table.add_column(column, justify="left" if column == "setting" else "right")
    for row in rows:
        table.add_row(*cells(row, speeds))
    return table


def columns(speeds: Mapping[str, float]) -> list[str]:
    """Return the heads of a comparison's columns."""
    of_time = ["seconds", "ratio of time"] if speeds else []
    return ["setting", "learning rate", "rates tried", "seeds there", "samples", "ratio", *of_time]


def cells(row: Comparison, speeds: Mapping[str, float]) -> list[str]:
    """Return the cells of a comparison's row."""
    attempt = row.attempt
    found = [
        attempt.setting,
        f"{attempt.learning_rate:g}",
        str(row.num_rates),
        f"{attempt.num_reached} of {len(attempt.samples)}",
        _spread(attempt.samples.values(), attempt.median_samples, ".0f"),
        _spread(row.ratios.values(), row.median_ratio, ".2f"),
    ]
    if not speeds:
        return found
    times = time_ratios(row, speeds)
    return [*found, _number(time_s(row, speeds), ".0f"), _spread(times, time_ratio(row, speeds), ".2f")]


def remarks(conditions: Conditions, target: float) -> list[str]:
    """Return what a reader of the tables has to know."""
    error = math.sqrt(target * (1 - target) / conditions.validation_samples)
    return [
        f"{conditions.model} on {conditions.dataset}, B = {conditions.batch_size}, at most {conditions.max_samples} samples;"
        f" {conditions.validation_samples} to validate on, so near the target one accuracy has a standard error of {error:.3f}.",
        "What a sample teaches does not depend on the machine: these samples may be multiplied by the seconds per sample that"
        " were measured on any test bed.",
    ]


def read_speeds(file: Path) -> dict[str, float]:
    """Read seconds per sample by contender, `{"deepspeed-1f1b": 0.021, "avgpipe-n2": 0.012}`; further contenders do no harm.

    Raises:
        RecipeError: it is no such file, or the contender that the others are compared with is not in it.

    """
    expected = f'{{"{CONTENDERS[BASE]}": 0.021, "avgpipe-n2": 0.012, ...}}, seconds per sample by contender'
    try:
        speeds = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecipeError(f"--seconds-per-sample {file}: expected {expected}; {error}.") from error
    if not isinstance(speeds, dict) or not all(_is_speed(value) for value in speeds.values()):
        raise RecipeError(f"--seconds-per-sample {file}: expected {expected}; got {speeds!r}.")
    if CONTENDERS[BASE] not in speeds:
        raise RecipeError(f"--seconds-per-sample {file}: expected {expected}; got no {CONTENDERS[BASE]!r}, only {list(speeds)}.")
    return speeds


def time_s(row: Comparison, speeds: Mapping[str, float]) -> float:
    """Return the seconds to the target; NaN where the contender's speed is not known."""
    return row.attempt.median_samples * speeds.get(CONTENDERS.get(row.attempt.setting, ""), math.nan)


def time_ratio(row: Comparison, speeds: Mapping[str, float]) -> float:
    """Return the time as a multiple of the base's; NaN where one of the speeds is not known."""
    return row.median_ratio * _slowness(row, speeds)


def time_ratios(row: Comparison, speeds: Mapping[str, float]) -> list[float]:
    """Return the same seed by seed."""
    return [ratio * _slowness(row, speeds) for ratio in row.ratios.values()]


def as_json(rows: Iterable[Comparison], speeds: Mapping[str, float], *, conditions: Conditions, target: float) -> dict[str, Any]:
    """Return everything that the tables show; null stands for "never" and for "not known"."""

    def finite(value: float) -> float | None:
        return value if math.isfinite(value) else None

    return {
        "conditions": conditions.model_dump(),
        "target": target,
        "settings": [
            {
                "setting": row.attempt.setting,
                "learning_rate": row.attempt.learning_rate,
                "learning_rates_tried": row.num_rates,
                "samples_to_target": {seed: finite(samples) for seed, samples in row.attempt.samples.items()},
                "median_samples_to_target": finite(row.attempt.median_samples),
                "ratios": {seed: finite(ratio) for seed, ratio in row.ratios.items()},
                "median_ratio": finite(row.median_ratio),
                "median_s_to_target": finite(time_s(row, speeds)),
                "ratio_of_time": finite(time_ratio(row, speeds)),
            }
            for row in rows
        ],
    }


def _slowness(row: Comparison, speeds: Mapping[str, float]) -> float:
    """Return its seconds per sample as a multiple of the base's; NaN where one of them is not known."""
    contender = CONTENDERS.get(row.attempt.setting, "")
    return speeds.get(contender, math.nan) / speeds.get(CONTENDERS[BASE], math.nan)


def _is_speed(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _spread(values: Iterable[float], middle: float, style: str) -> str:
    values = list(values)
    if not values:
        return "-"
    if len(set(values)) == 1 or math.isnan(middle):
        return _number(middle, style)
    return f"{_number(middle, style)} ({_number(min(values), style)} .. {_number(max(values), style)})"


def _number(value: float, style: str) -> str:
    if math.isnan(value):
        return "-"
    return "never" if math.isinf(value) else f"{value:{style}}"
