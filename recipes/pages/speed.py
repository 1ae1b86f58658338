"""Tables and plots of what `benchmark.py` measured."""

import json
import math
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from common.medians import median_extremes

from pages.markdown import spread, table

__all__ = ["means", "rivals", "setup", "speed", "tried"]

MIB = 1024**2


def speed(files: list[Path]) -> str:
    """One measurement, the fastest first."""
    (found,) = _read(files)
    columns = ["", "M", "s per step", "samples/s", "times DeepSpeed 1F1B", "memory, MiB"]
    busy = found["workload"]["mode"] == "emulated"
    if busy:
        columns.append("busy")
    rows = []
    for row in sorted(found["rows"], key=lambda row: -row["median_speedup"]):
        cells = [_name(row), str(row["num_micro_batches"])]
        cells += [spread(row["median_s"], row["min_s"], row["max_s"], ".3f"), f"{row['samples_per_second']:.1f}"]
        cells.append(spread(row["median_speedup"], row["min_speedup"], row["max_speedup"]))
        cells.append(f"{row['memory_bytes'] / MIB:.1f}")
        rows.append(cells + ([f"{row['busy']:.1%}"] if busy else []))
    return table(columns, rows) + _left_out(found)


def _left_out(found: dict[str, Any]) -> str:
    """Who could not take part, and why."""
    reasons = [f"- {name}: {reason}" for name, reason in found["left_out"].items()]
    return "\n\nNot in the table:\n\n" + "\n".join(reasons) if reasons else ""


def setup(files: list[Path]) -> str:
    """Command, versions and machine of measurements."""
    rows = []
    for file, found in zip(files, _read(files), strict=True):
        versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
        machine = f"{found['machine']['cpu']}, {found['machine']['cores']} cores"
        rows.append([f"[{file.stem}](raw/{file.name})", f"`{found['command']}`", versions, machine])
    return table(["measurement", "command", "versions", "machine"], rows)


def means(files: list[Path]) -> str:
    """How each contender did over several measurements: its median ratios, and their geometric mean if it took part in all."""
    every = _read(files)
    names = dict.fromkeys(_name(row) for found in every for row in found["rows"])
    by_name = {name: [_ratio(found, name) for found in every] for name in names}
    order = sorted(names, key=lambda name: (None in by_name[name], -_geometric_mean(by_name[name])))
    rows = []
    for name in order:
        mean = "-" if None in by_name[name] else f"{_geometric_mean(by_name[name]):.2f}"
        rows.append([name, mean, *("-" if ratio is None else f"{ratio:.2f}" for ratio in by_name[name])])
    return table(["times DeepSpeed 1F1B", "geometric mean", *(file.stem for file in files)], rows)


def rivals(files: list[Path]) -> str:
    """In each of several measurements, how many times as fast as the fastest of the others N pipelines were, repeat by repeat."""
    ours = [f"avgpipe-n{number}{shared}" for shared in ("", "-shared") for number in (2, 3, 4)]
    every = _read(files)
    there = {row["key"]: row["name"] for found in every for row in found["rows"] if row["key"] in ours}
    keys = [key for key in ours if key in there]
    rows = []
    for file, found in zip(files, every, strict=True):
        by_key = {row["key"]: row for row in found["rows"]}
        rival = max((row for row in found["rows"] if not row["key"].startswith("avgpipe")), key=lambda row: row["median_speedup"])
        cells = [file.stem, rival["name"], f"{rival['median_speedup']:.2f}"]
        for key in keys:
            if key not in by_key:
                cells.append("-")
                continue
            ratios = [theirs / own for theirs, own in zip(rival["seconds"], by_key[key]["seconds"], strict=True)]
            cells.append(spread(*median_extremes(ratios)))
        rows.append(cells)
    return table(
        ["", "fastest rival", "times DeepSpeed 1F1B", *(f"**{there[key].removeprefix('avgpipe_ds, ')}**" for key in keys)], rows
    )


def tried(files: list[Path]) -> str:
    """What the number of micro-batches costs each contender that searched for it: all it tried."""
    (found,) = _read(files)
    rows = []
    for row in found["rows"]:
        tried = ", ".join(
            f"{one['num_micro_batches']}: {one['seconds']:.3f} s" for one in row["tried"] if one.get("seconds") is not None
        )
        rows.append([_name(row), tried])
    return table(["", "M: seconds per step"], rows)


def _ratio(found: dict[str, Any], name: str) -> float | None:
    return next((float(row["median_speedup"]) for row in found["rows"] if _name(row) == name), None)


def _geometric_mean(ratios: Iterable[float | None]) -> float:
    return math.exp(statistics.fmean(math.log(ratio) for ratio in ratios if ratio is not None))


def _name(row: dict[str, Any]) -> str:
    ours = row["name"]
    return f"**{ours}**" if row["num_pipelines"] > 1 else str(ours)


def _read(files: list[Path]) -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in files]
