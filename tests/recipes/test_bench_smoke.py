"""The benchmarks in small, as users start it: who takes part and what is reported. Speeds are not looked at."""

import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from bench.contenders import all_contenders
from transformers import BertConfig, BertModel

ROOT = Path(__file__).parents[2]
SMALL = "--fixed-ms 0.2 --forward-ms 0.2 --input-ms 0.2 --weight-ms 0.2 --width 16 --length 2 --warmup 2".split()


def launch(recipe: str, *arguments: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    launcher = shutil.which("deepspeed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert launcher is not None
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [launcher, "--master_port", port, "--num_accelerators", "2", str(ROOT / "recipes" / recipe)]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=timeout_s, env=environment, check=False)


@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_all_contenders(tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    sizes = "--batch 24 --micro-batches 4 --batches 4 --repeats 1".split()
    done = launch("benchmark.py", *SMALL, *sizes, "--output", str(output), timeout_s=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads(output.read_text())
    contenders = all_contenders()
    assert [row["key"] for row in report["rows"]] == [contender.key for contender in contenders]
    assert report["left_out"] == {}
    for row, contender in zip(report["rows"], contenders, strict=True):
        assert contender.name in done.stdout
        assert row["num_micro_batches"] == contender.fixed(4)
        assert len(row["seconds"]) == len(row["speedups"]) == 1
        assert row["speedups"][0] == pytest.approx(report["rows"][0]["seconds"][0] / row["seconds"][0])
        assert row["seconds_per_sample"] == pytest.approx(row["median_s"] / 24)
        assert row["samples_per_second"] == pytest.approx(24 / row["median_s"])
        assert 0 < row["busy"] <= 1.0
        assert len(row["memory_by_rank"]) == 2
        assert all(
            rank[kind] > 0 for rank in row["memory_by_rank"] for kind in ("weights", "gradients", "optimizer", "activations")
        )
        assert (row["memory_by_rank"][0]["reference"] > 0) == (contender.num_pipelines > 1)
        assert row["memory_bytes"] == max(sum(rank.values()) for rank in row["memory_by_rank"])
    by_key = {row["key"]: row["memory_by_rank"][0] for row in report["rows"]}
    one, two, whole = by_key["deepspeed-1f1b"], by_key["avgpipe-n2"], by_key["deepspeed-zero0"]
    assert two["weights"] == 2 * one["weights"] and whole["weights"] == 2 * one["weights"]
    assert by_key["deepspeed-zero1"]["optimizer"] < whole["optimizer"]
    assert report["workload"]["num_stages"] == 2
    assert report["command"].startswith("deepspeed --num_accelerators 2 ") and "--micro-batches 4" in report["command"]
    assert all(report["versions"][name] for name in ("torch", "deepspeed", "python"))
    assert report["machine"]["cpu"] and report["machine"]["cores"] >= 1


@pytest.mark.distributed
@pytest.mark.timeout(240)
def test_search(tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    chosen = "--contenders deepspeed-dualpipev,torch-gpipe,avgpipe-n2 --batch 2".split()
    sizes = "--search-batches 2 --batches 2 --repeats 2".split()
    done = launch("benchmark.py", *SMALL, *chosen, *sizes, "--output", str(output), timeout_s=220)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads(output.read_text())
    assert [row["key"] for row in report["rows"]] == ["deepspeed-1f1b", "torch-gpipe", "avgpipe-n2"]
    assert "no M divides a batch of 2" in report["left_out"]["DeepSpeed DualPipeV"]
    assert "left out: DeepSpeed DualPipeV" in done.stdout
    for row in report["rows"]:
        assert [trial["num_micro_batches"] for trial in row["tried"]] == [1, 2]
        best = min((trial for trial in row["tried"] if trial["seconds"]), key=lambda trial: trial["seconds"])
        assert row["num_micro_batches"] == best["num_micro_batches"]
        assert best["memory_bytes"] > 0
        assert len(row["seconds"]) == 2


@pytest.mark.distributed
@pytest.mark.timeout(200)
def test_costs(tmp_path: Path) -> None:
    size = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
    BertModel(BertConfig(vocab_size=50, max_position_embeddings=16, **size)).save_pretrained(tmp_path / "bert")
    output = tmp_path / "costs.json"
    sizes = "--pipelines 1,2 --batch 2 --length 8 --iterations 1 --tracing-pairs 3".split()
    done = launch("costs.py", "--model", str(tmp_path / "bert"), *sizes, "--output", str(output), timeout_s=180)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "slower with" in done.stdout and "predicted" in done.stdout
    report = json.loads(output.read_text())
    assert report["command"].startswith("deepspeed --num_accelerators 2 ") and "--tracing-pairs 3" in report["command"]
    by_rank = report["ranks"]
    assert [[(one["stage"], one["num_pipelines"]) for one in found] for found in by_rank] == [[(0, 1), (0, 2)], [(1, 1), (1, 2)]]
    for one in (one for found in by_rank for one in found):
        assert len(one["tracing_slowdown"]) == 3
        # It records something and is far from all that an iteration does.
        assert all(0 < share < 0.5 for share in one["tracing_share"])
        assert all((share > 0) == (one["num_pipelines"] > 1) for share in one["averaging_share"])
        assert (one["memory"]["reference"] > 0) == (one["num_pipelines"] > 1)


@pytest.mark.distributed
@pytest.mark.timeout(240)
def test_tuning(tmp_path: Path) -> None:
    output = tmp_path / "tuning.json"
    sizes = "--batch 8 --pipelines 1,2 --micro-batches 2,4 --advances 0,1 --profile-micro-batches 4 --iterations 3".split()
    few = "--batches 2 --repeats 2 --searches 1".split()
    done = launch("tuning.py", *SMALL, *sizes, *few, "--output", str(output), timeout_s=220)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads(output.read_text())
    found = [(one["num_pipelines"], one["num_micro_batches"], one["advance"]) for one in report["settings"]]
    assert found == [(1, 2, 0), (1, 4, 0), (1, 4, 1), (2, 2, 0), (2, 4, 0), (2, 4, 1)]
    measured = [statistics.median(one["seconds"]) for one in report["settings"]]
    for name, by in report["predictors"].items():
        chosen = found.index(tuple(by["chosen"][key] for key in ("num_pipelines", "num_micro_batches", "advance")))
        assert by["regret"] == pytest.approx(measured[chosen] / min(measured) - 1)
        assert -1 <= by["rank_correlation"] <= 1 and all(one["predicted_s"][name] > 0 for one in report["settings"])
    for one in report["settings"]:
        kinds = ("weights", "gradients", "optimizer", "reference")
        for counted, predicted in zip(one["memory_by_rank"], one["predicted_memory"], strict=True):
            assert [counted[kind] for kind in kinds] == [predicted[kind] for kind in kinds]
            assert (counted["reference"] > 0) == (one["num_pipelines"] > 1) and counted["activations"] > 0
    assert len(report["searches"]) == 4  # of each N and M
    for search in report["searches"]:
        assert [decision["settled"] for decision in search["decisions"]][-1] and search["iterations"] > 0
        assert search["advance"] in range(search["num_micro_batches"] - 1)
    assert 0 < report["message_share"] and 0 < report["profile_s"]
    assert report["profile"]["num_micro_batches"] == 4 and report["machine"]["cores"] >= 1


def test_one_process_is_no_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in alone.items():
        monkeypatch.setenv(name, value)
    assert "a pipeline takes at least 2 accelerators, got 1" in failure("--micro-batches", "4")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--contenders torch-zvb", "Did you mean 'torch-zbv'?"),
        ("--mode imagined", "'emulated' or 'real', got 'imagined'"),
        ("--micro-batches many", "a number from 1, or 'auto', got 'many'"),
        ("--micro-batches 4 --memory-limit-mb 5", "use it with --micro-batches auto"),
        ("--pipelines 1,two", "such as 1,2, got '1,two'"),
    ],
)
def test_wrong_arguments_are_explained(arguments: str, message: str) -> None:
    """Before anything is connected, so one process without a launcher hears of them."""
    assert message in failure(*arguments.split())


def failure(*arguments: str) -> str:
    """What one process without a launcher says when it refuses to start."""
    command = [sys.executable, str(ROOT / "recipes" / "benchmark.py"), *arguments]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "COLUMNS": "300"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment, check=False)
    assert done.returncode == 2, done.stderr
    return done.stderr
