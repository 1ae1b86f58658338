"""Bad input, started by the stock launcher: a clear error on every rank, none left hanging, exit code not 0."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from avgpipe_ds.deepspeed_compat import MINIMUM_DEEPSPEED, check_deepspeed_version

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 150.0


def launch(how: str) -> tuple[int, str]:
    """Exit code and output of `deepspeed --num_accelerators 2 bad_input.py <how>`; nothing of it is left running."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launcher = str(Path(sys.executable).with_name("deepspeed"))
    script = str(ROOT / "tests" / "distributed" / "scripts" / "bad_input.py")
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [launcher, "--num_accelerators", "2", "--master_port", str(port), script, how],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            pytest.fail(f"{how} hung:\n{output[-5000:]}")
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    assert "terminate called" not in output
    return process.returncode, output


@pytest.fixture(scope="module")
def cases() -> tuple[int, str]:
    """All cases in one start."""
    return launch("cases")


def said_by(output: str, name: str) -> list[str]:
    """What the ranks said in a case, by rank."""
    found = dict(re.findall(rf"^CASE {name} RANK (\d) (.*)$", output, re.MULTILINE))
    assert sorted(found) == ["0", "1"], output[-5000:]
    return [found["0"], found["1"]]


REMOTE = "RemoteError: rank {} failed: "


WRONG = [
    # name of the case, the rank that fails (None: all alike), text
    ("layer-last", 1, "ArithmeticError: layer in a bad mood"),
    ("layer-first", 0, "ArithmeticError: layer in a bad mood"),
    (
        "output",
        0,
        "TypeError: the last layer of stage 0 must return a tensor or a tuple of tensors for the next stage, got a dict",
    ),
    ("nan", 1, "NonFiniteLoss: the loss is nan in pipeline 1, iteration 1, micro-batch 2"),
    ("empty", None, "DataExhausted: the data iterator is empty"),
    (
        "middle",
        None,
        "IncompleteIteration: the data ended within iteration 1: 5 micro-batches are left, an iteration takes 8",
    ),
    ("loader", 0, "OSError: disk on fire"),
    ("loader-ahead", 1, "OSError: disk on fire"),
    (
        "shorter-here",
        0,
        "AvgPipeError: the data of rank 1 ended at iteration 1 with 0 of 8 micro-batches, that of rank 0 did not",
    ),
    (
        "sizes",
        None,
        "inputs and labels of a micro-batch differ in size: 3 samples in the inputs (3, 16), 2 in the labels (2, 16)",
    ),
    ("loss", 1, "ValueError: the loss must be a scalar tensor, got a tensor of shape (3,): let loss_fn return one number"),
    ("frozen", 1, "ValueError: the loss does not depend on any trainable parameter of any stage: is everything frozen?"),
    ("no-iterator", None, "ValueError: the first and the last stage need data: pass data_iter to train_batch"),
    ("list", None, "TypeError: data_iter must be an iterator, got a list: pass iter(loader), made once per epoch"),
    ("zero2", None, 'ConfigError: "zero_optimization.stage" is 2: pipelines work with ZeRO 0 and 1'),
    ("zero3", None, 'ConfigError: "zero_optimization.stage" is 3: pipelines work with ZeRO 0 and 1'),
    (
        "key",
        None,
        'avgpipe.num_pipeline: unknown key; did you mean "avgpipe.num_pipelines"?',
    ),
    ("range", None, 'ConfigError: 3 problem(s) in the "avgpipe" block'),
    ("partition", None, '"avgpipe.partition" is [0, 2], the model has the boundaries [0, 1, 2]: give it to the module'),
    ("stages", None, "num_stages (3) must divide distributed world size (2)"),
]


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("name", "source", "text"), WRONG, ids=[name for name, _, _ in WRONG])
def test_every_rank_says_what_is_wrong(cases: tuple[int, str], name: str, source: int | None, text: str) -> None:
    for rank, said in enumerate(said_by(cases[1], name)):
        assert text in said
        if source is not None:
            assert said.startswith("" if rank == source else REMOTE.format(source))


@pytest.mark.timeout(180)
def test_an_engine_after_all_that_trains_and_an_error_nobody_catches_ends_the_job(cases: tuple[int, str]) -> None:
    code, output = cases
    assert said_by(output, "afterwards") == ["trained", "trained"]
    assert code == 1
    assert "[rank1]: ArithmeticError: layer in a bad mood" in output
    assert "[rank0]: avgpipe_ds.errors.RemoteError: rank 1 failed: ArithmeticError: layer in a bad mood" in output


@pytest.mark.timeout(180)
def test_a_script_that_just_ends_with_work_in_flight() -> None:
    code, output = launch("in-flight")
    assert code == 0, output[-5000:]
    assert "Traceback" not in output


@pytest.mark.timeout(180)
def test_the_job_ends_with_a_rank_that_is_killed() -> None:
    assert launch("kill")[0] != 0


@pytest.mark.parametrize("found", ["0.19.7", "0.18.0", "0.9.5+cu118"])
def test_an_old_deepspeed_is_refused(found: str) -> None:
    with pytest.raises(ImportError, match=rf"needs deepspeed >= {re.escape(MINIMUM_DEEPSPEED)}, found {re.escape(found)}: pip"):
        check_deepspeed_version(found)


def test_a_newer_deepspeed_gets_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    check_deepspeed_version(MINIMUM_DEEPSPEED)
    assert not caplog.records
    check_deepspeed_version("0.30.0")
    assert len(caplog.records) == 1 and "newer than" in caplog.text
