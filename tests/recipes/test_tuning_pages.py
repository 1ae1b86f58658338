"""Tables of tuning, from results written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pages.tuning import advances, choices, predictions


def setting(M: int, seconds: list[float], predicted: float, memory: tuple[int, int] = (100, 100), a: int = 0) -> dict[str, Any]:
    return {
        "num_pipelines": 1,
        "num_micro_batches": M,
        "advance": a,
        "seconds": seconds,
        "predicted_s": {"simulation": predicted, "paper": 2 * predicted},
        "memory_by_rank": [{"weights": 100, "activations": 100}] * 2,
        "predicted_memory": [{"weights": 100, "activations": bytes_} for bytes_ in memory],
    }


def saved(folder: Path, name: str, settings: list[dict[str, Any]], searches: list[dict[str, Any]] | None = None) -> Path:
    chosen = {"chosen": settings[0], "regret": 0.0125, "rank_correlation": 0.95}
    found = {"predictors": {"simulation": chosen, "paper": chosen}, "settings": settings, "searches": searches or []}
    file = folder / name
    file.write_text(json.dumps({**found, "profile_s": 9.6, "two_settings_s": 33.2, "message_share": 0.256}))
    return file


def rows(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()][2:]


def test_predictions_are_beside_what_was_measured(tmp_path: Path) -> None:
    file = saved(tmp_path, "a.json", [setting(4, [2.0, 2.2, 2.1], 2.31), setting(8, [1.0], 0.9, memory=(110, 80))])
    assert rows(predictions([file])) == [
        ["N = 1, M = 8, 1F1B", "1.000 (1.000 .. 1.000)", "0.900 (-10%)", "1.800 (+80%)", "-10.0%"],
        ["N = 1, M = 4, 1F1B", "2.100 (2.000 .. 2.200)", "2.310 (+10%)", "4.620 (+120%)", "+0.0%"],
    ]


def test_choices(tmp_path: Path) -> None:
    file = saved(tmp_path, "k4.json", [setting(4, [2.0], 2.0), setting(8, [1.0], 0.9, memory=(110, 80))])
    chosen = ["N = 1, M = 4, 1F1B", "1.2%", "0.950"]
    assert rows(choices([file])) == [["k4", "2", *chosen, *chosen, "-10.0%", "10 / 33"]]


def test_advances(tmp_path: Path) -> None:
    searches = [{"advance": 1, "iterations": 80}, {"advance": 2, "iterations": 120}]
    two = saved(tmp_path, "two.json", [setting(8, [2.0], 2.0), setting(8, [1.8], 1.8, a=1)], searches)
    one = saved(tmp_path, "one.json", [setting(8, [2.0], 2.0)])
    assert rows(advances([two, one])) == [
        ["two", "0.26", "2.000", "1.800", "1 after 80, 2 after 120"],
        ["one", "0.26", "2.000", "-", ""],
    ]
