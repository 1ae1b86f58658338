"""`avgpipe-check`: from a training script to a verdict; and `"preflight": true` under the stock launcher."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from avgpipe_ds.preflight import Report
from tests.distributed.test_tune import CONFIG, ENVIRONMENT, files, port, start, started

SCRIPT = str(Path(__file__).parent / "scripts" / "checkable.py")
CONFIGURED = (SCRIPT, "--deepspeed_config", "c.json")

pytestmark = pytest.mark.timeout(200)


def command(*options: str) -> list[str]:
    launcher = f"--num_accelerators 2 --master_port {port()}"
    return [sys.executable, "-m", "avgpipe_ds.preflight", "--launcher", launcher, *options]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a configuration in it."""
    (tmp_path / "c.json").write_text(CONFIG)
    return tmp_path


def test_a_sound_model_passes(folder: Path) -> None:
    done = start(command("--json", "report.json", *CONFIGURED), folder)
    assert done.returncode == 0, done.stdout + done.stderr
    for part in ("bert.encoder.layer.1", "passed: 0 error(s), 0 warning(s)", "in the unsplit model"):
        assert part in done.stdout, part
    assert "trained" not in done.stdout
    assert files(folder) == {"c.json", "report.json"} and (folder / "c.json").read_text() == CONFIG
    report = Report.load(folder / "report.json")
    assert len({row.stage_id for row in report.rows}) == 2 and report.comparison is not None and report.comparison.same


def test_a_bad_model_fails(folder: Path) -> None:
    done = start(command(SCRIPT, "--deepspeed_config=c.json", "--model", "detached"), folder)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "error stage 1, layer 1 (Detached): its output does not depend on its input" in done.stdout
    assert "failed: 1 error(s)" in done.stdout and files(folder) == {"c.json"} and started(folder) == []


def test_a_script_that_never_trains_is_no_success(folder: Path) -> None:
    done = start(command(*CONFIGURED, "--iterations", "0"), folder)
    assert done.returncode == 1 and "exit status 0 and no check: what it printed says why" in done.stderr, done.stderr
    assert files(folder) == {"c.json"}


def test_interrupted(folder: Path) -> None:
    """Ctrl-C, which a terminal sends to all that was started: nothing is left of it, neither files nor processes."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    whole = command(*CONFIGURED, "--dawdle")
    with subprocess.Popen(whole, cwd=folder, env=ENVIRONMENT, start_new_session=True, **pipes) as checking:
        assert checking.stdout is not None
        assert any("dawdling" in line for line in checking.stdout)
        assert len(started(folder)) >= 2
        os.killpg(checking.pid, signal.SIGINT)
        said = checking.communicate(timeout=60)[0]
    assert checking.returncode == 130 and "avgpipe-check: interrupted" in said, said
    assert started(folder) == [] and files(folder) == {"c.json"}


@pytest.mark.parametrize("model", ["bert", "unused", "detached"])
def test_a_run_that_checks_itself(folder: Path, model: str) -> None:
    """A sound model trains, one with warnings too, with the report in the log; errors end the script on every rank."""
    settings = {"train_micro_batch_size_per_gpu": 2, "steps_per_print": 1000, "avgpipe": {"num_pipelines": 2, "preflight": True}}
    (folder / "c.json").write_text(json.dumps(settings))
    launch = ["deepspeed", "--num_accelerators", "2", "--master_port", port()]
    done = start([*launch, *CONFIGURED, "--model", model], folder)
    said = done.stdout + done.stderr
    assert (done.returncode == 0) == (model != "detached"), said
    assert said.count("trained 2 iterations") == (0 if model == "detached" else 2)
    assert said.count("warning stage 1, layer 1 (Unused): 1.spare is given no gradient") == (model == "unused"), "by rank 0 alone"
    assert said.count("PreflightError: the check before training found 1 error(s)") == (2 if model == "detached" else 0)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((SCRIPT, "--epochs", "1"), "the script's arguments have no --deepspeed_config"),
        ((SCRIPT, "--deepspeed_config", "missing.json"), "missing.json"),
        ((), "the following arguments are required: script"),
    ],
)
def test_bad_options(folder: Path, arguments: tuple[str, ...], error: str) -> None:
    done = start(command(*arguments), folder)
    assert done.returncode != 0 and error in done.stderr, done.stderr
    assert files(folder) == {"c.json"}
