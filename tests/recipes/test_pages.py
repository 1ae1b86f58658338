"""The report page: its generated blocks say what the raw results say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer
from pages.blocks import refresh
from pages.bubbles import bubbles
from pages.costs import costs
from pages.speed import means, rivals, setup, speed, tried
from report import MAKERS, main

ROOT = Path(__file__).parents[2]


def row(key: str, seconds: list[float], speedups: list[float], **more: Any) -> dict[str, Any]:
    found = {"key": key, "name": key.upper(), "num_pipelines": 1, "num_micro_batches": 8, "tried": [], "memory_bytes": 3 * 2**20}
    found |= {"seconds": seconds, "min_s": min(seconds), "max_s": max(seconds), "median_s": sorted(seconds)[len(seconds) // 2]}
    found |= {"min_speedup": min(speedups), "max_speedup": max(speedups)}
    found |= {"median_speedup": sorted(speedups)[len(speedups) // 2], "samples_per_second": 32 / seconds[0]}
    return found | more


def result(*rows: dict[str, Any], mode: str = "real", **more: Any) -> dict[str, Any]:
    versions = {"torch": "2.13.0", "deepspeed": "0.19.8"}
    machine = {"cpu": "A CPU", "cores": 2}
    command = "deepspeed --num_accelerators 2 recipes/benchmark.py"
    base = {"workload": {"mode": mode, "batch": 32}, "command": command, "versions": versions, "machine": machine}
    return base | {"rows": list(rows), "left_out": {}} | more


BASE = row("deepspeed-1f1b", [2.0], [1.0])
OURS = row("avgpipe-n2", [1.0, 0.9, 1.1], [2.0, 1.8, 2.5], num_pipelines=2)


def saved(folder: Path, name: str, value: Any) -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(value))
    return file


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("|")]


def test_speed_has_the_fastest_first(tmp_path: Path) -> None:
    text = speed([saved(tmp_path, "a.json", result(BASE, OURS, left_out={"DUALPIPE": "needs more"}))])
    assert lines(text)[2:] == [
        "| **AVGPIPE-N2** | 8 | 1.000 (0.900 .. 1.100) | 32.0 | 2.00 (1.80 .. 2.50) | 3.0 |",
        "| DEEPSPEED-1F1B | 8 | 2.000 (2.000 .. 2.000) | 16.0 | 1.00 (1.00 .. 1.00) | 3.0 |",
    ]
    assert "- DUALPIPE: needs more" in text and "busy" not in text


def test_emulated_accelerators_have_a_busy_share(tmp_path: Path) -> None:
    found = result(row("deepspeed-1f1b", [2.0], [1.0], busy=0.655), mode="emulated")
    head, _, only = lines(speed([saved(tmp_path, "a.json", found)]))
    assert head.endswith("busy |") and only.endswith("| 65.5% |")


def test_means_are_geometric_where_all_measurements_have_the_row(tmp_path: Path) -> None:
    files = [
        saved(tmp_path, "k4.json", result(BASE, OURS, row("zbv", [1.0], [1.5]))),
        saved(tmp_path, "k8.json", result(BASE, row("avgpipe-n2", [1.0], [8.0], num_pipelines=2))),
    ]
    assert lines(means(files)) == [
        "| times DeepSpeed 1F1B | geometric mean | k4 | k8 |",
        "| --- | ---: | ---: | ---: |",
        "| **AVGPIPE-N2** | 4.00 | 2.00 | 8.00 |",
        "| DEEPSPEED-1F1B | 1.00 | 1.00 | 1.00 |",
        "| ZBV | - | 1.50 | - |",
    ]


def test_rivals_are_those_of_each_measurement(tmp_path: Path) -> None:
    ours = {"num_pipelines": 2, "name": "avgpipe_ds, N = 2"}
    files = [
        saved(
            tmp_path, "k4.json", result(BASE, row("zbv", [1.5, 1.2], [1.5, 1.6]), row("avgpipe-n2", [1.0, 0.6], [2, 3], **ours))
        ),
        saved(tmp_path, "k8.json", result(BASE, row("zbv", [3.0], [0.5]), row("avgpipe-n1", [1.0], [2.0]))),
    ]
    assert lines(rivals(files)) == [
        "|  | fastest rival | times DeepSpeed 1F1B | **N = 2** |",
        "| --- | ---: | ---: | ---: |",
        "| k4 | ZBV | 1.60 | 1.75 (1.50 .. 2.00) |",
        "| k8 | DEEPSPEED-1F1B | 1.00 | - |",
    ]


def test_setup_names_command_versions_and_machine(tmp_path: Path) -> None:
    (_, _, only) = lines(setup([saved(tmp_path, "raw/k4.json", result(BASE))]))
    assert "[k4](raw/k4.json)" in only and "`deepspeed --num_accelerators 2 recipes/benchmark.py`" in only
    assert "torch 2.13.0, deepspeed 0.19.8" in only and "A CPU, 2 cores" in only


def test_what_was_tried(tmp_path: Path) -> None:
    trials = [{"num_micro_batches": 4, "seconds": 0.5}, {"num_micro_batches": 8, "seconds": None, "note": "too slow"}]
    assert "4: 0.500 s" in tried([saved(tmp_path, "a.json", result(BASE | {"tried": trials}))])


def test_bubbles_leave_out_what_takes_no_time(tmp_path: Path) -> None:
    stages = [
        {"stage_id": 0, "shares": {"compute": 0.9, "sending": 0.0001, "executor": 0.0999}},
        {"stage_id": 1, "shares": {"compute": 0.8, "sending": 0.0, "executor": 0.2}},
    ]
    text = bubbles([saved(tmp_path, "a.json", stages)])
    assert lines(text)[2:] == ["| compute | 90.0% | 80.0% |", "| executor | 10.0% | 20.0% |"]


def test_costs_of_each_stage(tmp_path: Path) -> None:
    def stage(number: int, pipelines: int) -> dict[str, Any]:
        found = {"num_pipelines": pipelines, "stage": number, "iteration_s": 0.5, "executor_ms": [0.1, 0.3, 0.2]}
        found |= {"averaging_share": [0.0, 0.02, 0.01], "tracing_share": [0.001, 0.0, 0.002]}
        found |= {"tracing_slowdown": [0.01, -0.02, 0.02]}
        return found | {"memory": {"weights": 2**20, "activations": 2**21}}

    by_rank = [[stage(rank, pipelines) for pipelines in (1, 2)] for rank in (0, 1)]
    assert lines(costs([saved(tmp_path, "a.json", {"ranks": by_rank})]))[2:] == [
        f"| {pipelines} | {rank} | 0.500 | 0.20 (0.10 .. 0.30) | 1.0% (0.0% .. 2.0%) | 0.10% (0.00% .. 0.20%) "
        "| 1.0% (-2.0% .. 2.0%) | 3 |"
        for pipelines in (1, 2)
        for rank in (0, 1)
    ]


def curve(setting: str, seed: int, accuracies: list[float], rate: float = 1e-4) -> str:
    conditions = {"model": "m", "dataset": "d", "max_length": 32, "batch_size": 16, "max_samples": 1600, "eval_every": 320}
    conditions |= {"warmup_samples": 0, "validation_samples": 800}
    points = [{"samples": 320 * (i + 1), "accuracy": a, "loss": 1.0, "training_loss": 1.0} for i, a in enumerate(accuracies)]
    run = {"setting": setting, "learning_rate": rate, "seed": seed, "conditions": conditions, "num_stages": 1}
    return json.dumps(run | {"num_micro_batches": 1, "stopped_at": None, "curve": points, "run_s": 1.0, "versions": {}})


def test_time_to_accuracy_multiplies_samples_by_speed(tmp_path: Path) -> None:
    slow, fast = [0.2, 0.4, 0.8, 0.8, 0.8, 0.8], [0.2, 0.8, 0.8, 0.8, 0.8, 0.8]
    runs = tmp_path / "runs.jsonl"
    settings = [("reference", slow), ("deepspeed-1x", slow), ("deepspeed-2x", slow), ("n2-avgpipe-outer1-alpha1/2", fast)]
    runs.write_text("\n".join(curve(name, seed, points) for name, points in settings for seed in (0, 1)))
    zero_bubble = row("torch-zbv", [1.0, 0.8], [1.6, 2.0], seconds_per_sample=0.012)
    files = [
        runs,
        saved(
            tmp_path,
            "k4.json",
            result(BASE | {"seconds_per_sample": 0.02}, OURS | {"seconds_per_sample": 0.01}, zero_bubble),
        ),
        saved(tmp_path, "k4-twice.json", result(BASE | {"seconds_per_sample": 0.015})),
        saved(tmp_path, "k8.json", result(BASE | {"seconds_per_sample": 0.02}, OURS | {"seconds_per_sample": 0.04})),
    ]
    files[2].write_text(files[2].read_text().replace('"batch": 32', '"batch": 64'))
    ratio = float(lines(MAKERS["accuracy-95"]([runs]))[-1].split("|")[6])
    assert 0 < ratio < 1
    head, _, *rows = lines(MAKERS["times-95"](files))
    assert head == "| who (samples) | k4 | k8 |"
    found = {cells[0]: cells[1:] for cells in ([cell.strip() for cell in line.split("|")[1:-1]] for line in rows)}
    ours = found[f"n2-avgpipe-outer1-alpha1/2 ({ratio:.2f})"]
    assert [float(cell.split()[0]) for cell in ours] == pytest.approx([ratio / 2, ratio * 2], abs=0.015), "the ratio is rounded"
    assert found["deepspeed-2x (1.00)"] == ["0.75 (0.75 .. 0.75)", "-"]
    assert found["TORCH-ZBV (1)"] == ["0.50 (0.50 .. 0.62)", "-"], "it trains what DeepSpeed's pipeline trains"
    assert len(found) == 3, "neither the base nor one whose speed nobody has measured"
    assert list(found)[0].startswith("n2"), "the first one there comes first"


def test_every_learning_rate(tmp_path: Path) -> None:
    runs = tmp_path / "runs.jsonl"
    slow, fast = [0.2, 0.4, 0.8, 0.8, 0.8, 0.8], [0.2, 0.8, 0.8, 0.8, 0.8, 0.8]
    tried = [
        ("reference", 1e-4, slow),
        ("deepspeed-1x", 2e-4, fast),
        ("deepspeed-1x", 1e-4, slow),
        ("deepspeed-1x", 4e-4, fast[:1]),
    ]
    runs.write_text("\n".join(curve(name, 0, points, rate) for name, rate, points in tried))
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines(MAKERS["rates-90"]([runs]))[2:]]
    found = [(row[0], row[1], row[-1]) for row in rows if row and row[0] == "deepspeed-1x"]
    assert found[1] == ("deepspeed-1x", "0.0002", "1.00") and found[2] == ("deepspeed-1x", "0.0004", "never")
    assert found[0][1] == "0.0001" and float(found[0][2]) > 1


PAGE = "# Title\n\n<!-- one: a b/c -->\nold\n<!-- end -->\nkept\n<!-- two: a -->\n<!-- end -->\n"


def test_only_blocks_change(tmp_path: Path) -> None:
    saved(tmp_path, "a", 1)
    saved(tmp_path, "b/c", 2)
    makers = {"one": lambda files: " ".join(file.read_text() for file in files), "two": lambda files: "new"}
    page = refresh(PAGE, tmp_path, makers)
    assert page == ("# Title\n\n<!-- one: a b/c -->\n\n1 2\n\n<!-- end -->\nkept\n<!-- two: a -->\n\nnew\n\n<!-- end -->\n")
    assert refresh(page, tmp_path, makers) == page


@pytest.mark.parametrize(
    ("page", "problem"),
    [
        (PAGE, "there is no maker 'two' for a; there are broken, one"),
        ("<!-- one: a -->\nold\n", "a block has no end"),
        ("<!-- one: a -->\n<!-- one: a -->\n<!-- end -->\n", "a block has no end"),
        ("<!-- one: missing -->\n<!-- end -->\n", "missing, which is not there"),
    ],
)
def test_a_page_that_is_wrong(tmp_path: Path, page: str, problem: str) -> None:
    saved(tmp_path, "a", 1)
    saved(tmp_path, "b/c", 2)
    with pytest.raises(ValueError, match=re.escape(problem)):
        refresh(page, tmp_path, {"one": lambda files: "x", "broken": lambda files: {}["rows"]})


def test_a_page_gets_its_plots(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    saved(raw, "k4.json", result({**BASE, "num_micro_batches": 16}, {**OURS, "name": "N2"}))
    (raw / "reference.jsonl").write_text(curve("reference", 0, [0.5, 0.8]))
    page = saved(tmp_path, "page.md", "")
    page.write_text(
        "<!-- speed: raw/k4.json -->\n<!-- end -->\n<!-- accuracy-95: raw/reference.jsonl -->\n<!-- end -->\n", encoding="utf-8"
    )
    main([page], check=False)
    bars = (tmp_path / "plots/k4.svg").read_text()
    assert "DEEPSPEED-1F1B, M = 16" in bars and "N2, M = 8" in bars and ">2.00<" in bars
    curves = (tmp_path / "plots/reference.svg").read_text()
    assert "target 0." in curves
    main([page], check=False)
    again = [(tmp_path / "plots" / name).read_text() for name in ("k4.svg", "reference.svg")]
    assert again == [bars, curves], "the same results, another picture"
    main([page], check=True)
    (raw / "reference.jsonl").write_text("")
    with pytest.raises(typer.BadParameter, match="page.md: block 'accuracy-95' can't be made .*No run of the reference"):
        main([page], check=False)


@pytest.mark.parametrize("page", ["README.md", "docs/benchmarks/README.md", "docs/tuning.md"])
def test_the_pages_of_this_repository_are_what_their_raw_results_say(page: str) -> None:
    text = (ROOT / page).read_text()
    assert refresh(text, (ROOT / page).parent, MAKERS) == text
    for picture in re.findall(r"!\[[^]]*\]\(([^)]+)\)", text):
        assert ((ROOT / page).parent / picture).exists(), picture
