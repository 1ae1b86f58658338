"""Tables of what `recipes/tuning.py` measured beside what tuning predicted."""

import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from avgpipe_ds.tuning.setting import Setting
from pages.markdown import table

__all__ = ["advances", "choices", "predictions"]


def predictions(files: list[Path]) -> str:
    """One grid: seconds measured and predicted of every setting, and how far off the memory of any stage is."""
    (found,) = _read(files)
    names = list(found["predictors"])
    rows = []
    for one in sorted(found["settings"], key=lambda one: _measured_s(one)):
        measured = _measured_s(one)
        predicted = [f"{one['predicted_s'][name]:.3f} ({one['predicted_s'][name] / measured - 1:+.0%})" for name in names]
        spread = f"{measured:.3f} ({min(one['seconds']):.3f} .. {max(one['seconds']):.3f})"
        rows.append([_setting(one), spread, *predicted, f"{_memory_error(one):+.1%}"])
    return table(["", "s per B samples", *names, "memory, of the stage that is furthest off"], rows)


def choices(files: list[Path]) -> str:
    """Several grids: what each predictor chose, how much slower that is than the best, and what tuning took."""
    every = _read(files)
    names = list(every[0]["predictors"])
    heads = [f"{name}: {what}" for name in names for what in ("chose", "regret", "rank correlation")]
    rows = []
    for file, found in zip(files, every, strict=True):
        cells = [file.stem, str(len(found["settings"]))]
        for name in names:
            by = found["predictors"][name]
            cells += [_setting(by["chosen"]), f"{by['regret']:.1%}", f"{by['rank_correlation']:.3f}"]
        worst = max((_memory_error(one) for one in found["settings"]), key=abs)
        rows.append([*cells, f"{worst:+.1%}", f"{found['profile_s']:.0f} / {found['two_settings_s']:.0f}"])
    return table(["", "settings", *heads, "memory, at worst", "s of the profile / of two settings"], rows)


def advances(files: list[Path]) -> str:
    """Algorithm 1: the seconds of each fixed advance, and where the searches ended."""
    every = _read(files)
    most = max(one["advance"] for found in every for one in found["settings"])
    rows = []
    for file, found in zip(files, every, strict=True):
        by_advance = {one["advance"]: _measured_s(one) for one in found["settings"]}
        ends = [f"{search['advance']} after {search['iterations']}" for search in found["searches"]]
        cells = [f"{by_advance[a]:.3f}" if a in by_advance else "-" for a in range(most + 1)]
        rows.append([file.stem, f"{found['message_share']:.2f}", *cells, ", ".join(ends)])
    heads = [f"advance {a}, s" for a in range(most + 1)]
    return table(["", "a message / a forward", *heads, '"auto" settled on, iterations'], rows)


def _setting(one: Mapping[str, Any]) -> str:
    return str(Setting(**{key: one[key] for key in ("num_pipelines", "num_micro_batches", "advance")}))


def _measured_s(one: Mapping[str, Any]) -> float:
    """Seconds per B samples."""
    return float(statistics.median(one["seconds"]))


def _memory_error(one: Mapping[str, Any]) -> float:
    """Of the stage whose predicted memory is furthest from the measured one, as a part of that."""
    pairs = zip(one["predicted_memory"], one["memory_by_rank"], strict=True)
    errors = [float(sum(predicted.values()) / sum(measured.values()) - 1) for predicted, measured in pairs]
    return max(errors, key=abs)


def _read(files: list[Path]) -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in files]
