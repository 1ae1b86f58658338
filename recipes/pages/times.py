"""Time to an accuracy: the samples of `time_to_accuracy.py` with the speeds of `benchmark.py`, on several test beds."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accuracy.analysis import BASE, Comparison, attempts, compare
from accuracy.records import read_all
from accuracy.report import CONTENDERS, time_ratios
from accuracy.settings import SETTINGS
from accuracy.target import target_accuracy
from common.medians import median_extremes

from pages.blocks import Maker
from pages.markdown import spread, table

__all__ = ["times"]

_UNKNOWN = "-"
_COMPARED = [setting.name for setting in SETTINGS if setting.decisive and setting.name != BASE]


@dataclass(frozen=True, kw_only=True)
class _Bed:
    """One test bed.

    Attributes:
        name: of its first result, which is of batch B.
        speeds: seconds per sample by contender; one with F times the batch of the first result is called "<contender>-Fx".
        rows: of the first result, by contender.

    """

    name: str
    speeds: Mapping[str, float]
    rows: Mapping[str, dict[str, Any]]

    def of_setting(self, row: Comparison) -> str:
        """Its time as a part of the base's; the spread is that of the samples."""
        parts = time_ratios(row, self.speeds)
        return spread(*median_extremes(parts)) if parts and all(map(math.isfinite, parts)) else _UNKNOWN

    def of_rival(self, key: str) -> str:
        """The time of one that trains what the base trains; the spread is that of the speeds."""
        if key not in self.rows:
            return _UNKNOWN
        found = self.rows[key]
        return spread(1 / found["median_speedup"], 1 / found["max_speedup"], 1 / found["min_speedup"])


def times(fraction: float) -> Maker:
    """What makes a table of times to `fraction` of the reference's accuracy, as parts of the time of DeepSpeed's pipeline.

    Its files are runs (.jsonl), and for each test bed a result of the benchmark (.json) with batch B, followed by others of the
    same bed with multiples of it. Whoever trains the same batch as the base in one optimizer step needs as many samples, so its
    time follows from its speed.
    """

    def make(files: list[Path]) -> str:
        records = read_all(file for file in files if file.suffix == ".jsonl")
        beds = _beds([file for file in files if file.suffix == ".json"])
        rows = compare(attempts(records, target_accuracy(records, fraction)))
        cells = [
            [f"{row.attempt.setting} ({row.median_ratio:.2f})", *(bed.of_setting(row) for bed in beds)]
            for row in rows
            if row.attempt.setting in _COMPARED
        ]
        rivals = {key: found["name"] for bed in beds for key, found in bed.rows.items() if not key.startswith("avgpipe")}
        rivals.pop(CONTENDERS[BASE], None)
        cells += [[f"{name} (1)", *(bed.of_rival(key) for bed in beds)] for key, name in rivals.items()]
        known = [row for row in cells if any(cell != _UNKNOWN for cell in row[1:])]
        return table(["who (samples)", *(bed.name for bed in beds)], sorted(known, key=_first_known))

    return make


def _beds(files: list[Path]) -> list[_Bed]:
    """A result with the batch of the first file begins a test bed."""
    groups: list[list[tuple[Path, dict[str, Any]]]] = []
    for file in files:
        found = json.loads(file.read_text())
        if not groups or found["workload"]["batch"] == groups[0][0][1]["workload"]["batch"]:
            groups.append([])
        groups[-1].append((file, found))
    return [_bed(group) for group in groups]


def _bed(group: list[tuple[Path, dict[str, Any]]]) -> _Bed:
    (file, first), *_ = group
    speeds: dict[str, float] = {}
    for _, found in group:
        factor = found["workload"]["batch"] / first["workload"]["batch"]
        for row in found["rows"]:
            speeds[row["key"] if factor == 1 else f"{row['key']}-{factor:g}x"] = row["seconds_per_sample"]
    return _Bed(name=file.stem, speeds=speeds, rows={row["key"]: row for row in first["rows"]})


def _first_known(cells: Sequence[str]) -> float:
    """The time on the first bed that has one."""
    return next(float(cell.split()[0]) for cell in cells[1:] if cell != _UNKNOWN)
