"""`avgpipe-tune`: from a training script to a configuration that trains with the setting it chose."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = str(Path(__file__).parent / "scripts" / "tunable.py")
ENVIRONMENT = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "COLUMNS": "140"}
CONFIG = """{
  // as users write it, with comments
  "train_micro_batch_size_per_gpu": 2,
  "gradient_accumulation_steps": 4,
  "gradient_clipping": 1.0,
  "avgpipe": {"num_pipelines": 2, "averaging": {"alpha": 0.25}, "schedule": {"name": "1f1b"}}
}"""

pytestmark = pytest.mark.timeout(200)


def start(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=150, check=False)


def tune(folder: Path, *options: str, script: tuple[str, ...] = (SCRIPT,)) -> subprocess.CompletedProcess[str]:
    return start(command(*options, script=script), folder)


def command(*options: str, script: tuple[str, ...]) -> list[str]:
    launcher = f"--num_accelerators 2 --master_port {port()}"
    return [sys.executable, "-m", "avgpipe_ds.tuning", "--launcher", launcher, *options, *script]


def port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_from_a_script_to_a_configuration(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(CONFIG)
    arguments = ("--deepspeed_config", "c.json")
    options = ("--iterations", "4", "--profile", "profile.json", "--max-pipelines", "3")
    done = tune(tmp_path, *options, script=(SCRIPT, *arguments))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "predicted for B = 8 over K = 2 stages" in done.stdout and "c.tuned.json trains with N = " in done.stdout
    assert files(tmp_path) == {"c.json", "c.tuned.json", "profile.json"} and (tmp_path / "c.json").read_text() == CONFIG
    tuned: dict[str, Any] = json.loads((tmp_path / "c.tuned.json").read_text())
    assert tuned["train_micro_batch_size_per_gpu"] * tuned["gradient_accumulation_steps"] == 8
    assert tuned["gradient_clipping"] == 1.0 and tuned["avgpipe"]["averaging"] == {"alpha": 0.25}
    number = tuned["avgpipe"]["num_pipelines"]
    launch = ["deepspeed", "--num_accelerators", "2", "--master_port", port()]
    trained = start([*launch, SCRIPT, "--deepspeed_config=c.tuned.json", "--iterations", "2"], tmp_path)
    assert f"trained 2 iterations of {number} pipelines, {8 * number} samples each" in trained.stdout, trained.stderr[-3000:]

    again = tune(tmp_path, *options, "--memory-limit-gb", "1e-6", script=(SCRIPT, *arguments))
    assert again.returncode == 1 and "profile of profile.json" in again.stdout
    assert "no setting fits into the memory limit" in again.stderr and "Raise avgpipe.memory_limit_gb to that" in again.stderr
    few = tune(tmp_path, *options, "--predictor", "paper", "--output", "few.json", script=(SCRIPT, f"{arguments[0]}=c.json"))
    assert few.returncode == 0 and "few.json" in files(tmp_path)


def test_a_run_that_fails_or_ends_early_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(CONFIG)
    early = tune(tmp_path, script=(SCRIPT, "--deepspeed_config", "c.json", "--stages", "5"))
    assert early.returncode == 1 and "and no profile: what it printed says why" in early.stderr
    assert files(tmp_path) == {"c.json"}


@pytest.mark.parametrize(
    ("interrupt", "number"),
    [(os.killpg, signal.SIGINT), (os.kill, signal.SIGINT), (os.kill, signal.SIGTERM)],
    ids=["ctrl-c", "interrupt", "terminate"],
)
def test_interrupted(tmp_path: Path, interrupt: Callable[[int, int], None], number: int) -> None:
    """Ctrl-C, which a terminal sends to a whole group, or a signal to the command alone: neither files nor processes are left."""
    (tmp_path / "c.json").write_text(CONFIG)
    endless = (SCRIPT, "--deepspeed_config", "c.json", "--iterations", "1000000")
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    whole = command("--iterations", "1000000", script=endless)
    with subprocess.Popen(whole, cwd=tmp_path, env=ENVIRONMENT, start_new_session=True, **pipes) as tuning:
        assert tuning.stdout is not None
        assert any("training has begun" in line for line in tuning.stdout)
        assert len(started(tmp_path)) >= 2
        interrupt(tuning.pid, number)
        said = tuning.communicate(timeout=60)[0]
    assert tuning.returncode == 130 and "interrupted; nothing was written" in said, said
    assert started(tmp_path) == []
    assert files(tmp_path) == {"c.json"}


def started(folder: Path) -> list[psutil.Process]:
    """Processes that run with a configuration in the folder."""
    return [one for one in psutil.process_iter(["cmdline"]) if any(str(folder) in word for word in one.info["cmdline"] or ())]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((SCRIPT, "--epochs", "1"), "the script's arguments have no --deepspeed_config"),
        ((SCRIPT, "--deepspeed_config", "missing.json"), "missing.json"),
        (("--memory-limit-gb", "-1", SCRIPT, "--deepspeed_config", "c.json"), "--memory-limit-gb must be above 0, got -1"),
        (("--output", "no/where.json", SCRIPT, "--deepspeed_config", "c.json"), "there is no folder no"),
        (("--max-pipelines", "0", SCRIPT, "--deepspeed_config", "c.json"), "expected an integer from 1 to 64, got '0'"),
        (("--max-pipelines", "9999", SCRIPT, "--deepspeed_config", "c.json"), "expected an integer from 1 to 64, got '9999'"),
        (("--iterations", "x", SCRIPT, "--deepspeed_config", "c.json"), "expected an integer from 1, got 'x'"),
        (("--output", ".", SCRIPT, "--deepspeed_config", "c.json"), "is a folder"),
        (
            ("--profile", "no/where.json", SCRIPT, "--deepspeed_config", "c.json"),
            "no/where.json: there is no folder no",
        ),
        (("--profile", "c.json", SCRIPT, "--deepspeed_config", "c.json"), "c.json is no profile"),
    ],
)
def test_bad_options(tmp_path: Path, arguments: tuple[str, ...], error: str) -> None:
    (tmp_path / "c.json").write_text(CONFIG)
    done = tune(tmp_path, script=arguments)
    assert done.returncode != 0 and error in done.stderr, done.stderr
    assert files(tmp_path) == {"c.json"}
