"""The emulated cluster with real namespaces and real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from emulation import hosts
from emulation.network import Network, remove_leftovers
from emulation.requirements import missing
from emulation.shaping import Shaping

CLUSTER = [sys.executable, str(Path(__file__).parents[2] / "launch" / "cluster.py")]
TIMEOUT_S = 60
LACKING = missing()

pytestmark = [
    pytest.mark.skipif(bool(LACKING), reason=f"the emulated cluster needs {'; '.join(LACKING)}"),
    pytest.mark.distributed,
    pytest.mark.timeout(2 * TIMEOUT_S),
]


def namespaces(pid: int) -> list[str]:
    """Those of the cluster with this process number."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True, timeout=10).stdout
    return [line.split()[0] for line in listed.splitlines() if line.startswith(f"avgpipe-{pid}-")]


def hosts_of(pid: int) -> list[int]:
    """What runs in the namespaces of a cluster's hosts."""
    found = []
    for namespace in namespaces(pid):
        listed = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, timeout=10).stdout
        found += [int(word) for word in listed.split()]
    return found


def eventually(condition: Callable[[], bool], *, within_s: float = TIMEOUT_S) -> bool:
    end = time.monotonic() + within_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


def is_running(pid: int) -> bool:
    """Whether it exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts clusters; ends those that a failed test leaves."""
    started: list[subprocess.Popen[str]] = []

    def begin(*arguments: Any) -> subprocess.Popen[str]:
        environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        command = [*CLUSTER, *map(str, arguments)]
        started.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield begin
    for process in started:
        process.terminate()
        process.communicate(timeout=TIMEOUT_S)


ALL_REDUCE = """
import os, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
sums = torch.full((2_000_000,), float(rank + 1))
dist.all_reduce(sums)
assert sums.eq(3).all(), sums
dist.barrier()
start = time.perf_counter()
dist.all_reduce(sums)
bits = 8 * sums.numel() * sums.element_size()  # each rank sends half of it twice
print("rank", rank, "of", dist.get_world_size(), os.environ["MASTER_ADDR"], sys.argv[1:])
print("started as", os.environ["AVGPIPE_CLUSTER"])
print("rate", bits / (time.perf_counter() - start))
dist.destroy_process_group()  # or torch now and then aborts at exit
"""


def test_a_script_runs_with_the_bandwidth_that_was_asked_for(tmp_path: Path, start: Callable[..., Any]) -> None:
    script = tmp_path / "all_reduce.py"
    script.write_text(ALL_REDUCE)
    process = start("--hosts", 2, "--bandwidth", "200mbit", "--no-pin", script, "--measure")
    output, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, errors
    assert "rank 0 of 2 10.0.0.1 ['--local_rank=0', '--measure']\n" in output
    assert "[host 1] rank 1 of 2 10.0.0.1 ['--local_rank=0', '--measure']\n" in output
    assert "started as python launch/cluster.py --hosts 2 --bandwidth 200mbit --no-pin\n" in output
    rates = [float(line.split()[-1]) for line in output.splitlines() if " rate " in f" {line}"]
    assert len(rates) == 2
    assert all(200e6 / 3 < rate < 200e6 * 1.15 for rate in rates), rates
    assert namespaces(process.pid) == []


# Host 0 leaves a process behind that is nobody's child any more and does not end when it is asked to.
FAILING = """
import os, pathlib, subprocess, sys, time
folder = pathlib.Path(sys.argv[2])
if os.environ["RANK"] == "1":
    while not (folder / "pids").exists():
        time.sleep(0.05)
    print("no more", file=sys.stderr)
    sys.exit(7)
leave = "trap '' TERM; sleep 600 >/dev/null 2>&1 & echo $!"
left = subprocess.run(["sh", "-c", leave], stdout=subprocess.PIPE, text=True).stdout
(folder / "new").write_text(f"{os.getpid()} {left}")
(folder / "new").rename(folder / "pids")
time.sleep(600)
"""


def test_a_host_that_fails_ends_all_with_its_exit_code(tmp_path: Path, start: Callable[..., Any]) -> None:
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    process = start(script, tmp_path)
    _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 7, errors
    assert "[host 1] no more\n" in errors
    assert "[cluster] host 1 ended with exit code 7: stopping all hosts\n" in errors
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2 and eventually(lambda: not any(map(is_running, pids)))
    assert namespaces(process.pid) == []


def test_sigterm_removes_everything_and_clean_only_what_the_dead_have_left(start: Callable[..., Any]) -> None:
    killed, living = start("--measure"), start("--measure", "--hosts", 3)
    assert eventually(lambda: len(namespaces(killed.pid)) == 3 and len(namespaces(living.pid)) == 4)
    killed.kill()
    killed.wait(timeout=TIMEOUT_S)
    assert len(namespaces(killed.pid)) == 3, "nobody could remove them"

    assert start("--clean").wait(timeout=TIMEOUT_S) == 0
    assert namespaces(killed.pid) == []
    assert len(namespaces(living.pid)) == 4

    living.send_signal(signal.SIGTERM)
    _, errors = living.communicate(timeout=TIMEOUT_S)
    assert living.returncode == 128 + signal.SIGTERM, errors
    assert namespaces(living.pid) == []


def test_a_start_removes_what_the_dead_have_left_and_their_processes_end_with_them(start: Callable[..., Any]) -> None:
    killed = start("--measure")
    assert eventually(lambda: len(hosts_of(killed.pid)) == 2)
    processes = hosts_of(killed.pid)
    killed.kill()
    killed.wait(timeout=TIMEOUT_S)
    assert eventually(lambda: not any(map(is_running, processes)), within_s=4), "they would measure for longer"

    later = start("--measure")
    assert eventually(lambda: len(namespaces(later.pid)) == 3)
    assert namespaces(killed.pid) == []
    later.send_signal(signal.SIGINT)
    _, errors = later.communicate(timeout=TIMEOUT_S)
    assert later.returncode == 128 + signal.SIGINT, errors
    assert "removed what a killed cluster left" in errors
    assert namespaces(later.pid) == []


STUBBORN = ["sh", "-c", "trap '' TERM; sleep 600 & wait"]


def test_who_does_not_end_in_time_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "_GRACE_S", 0.5)
    with Network(2, Shaping(10**9)) as network, hosts.StopSignals() as signals:
        began = time.monotonic()
        code = hosts.run_on_hosts(network.hosts, [["sh", "-c", "sleep 0.5; exit 3"], STUBBORN], cores=None, signals=signals)
        assert code == 3
        assert time.monotonic() - began < 10
        assert hosts_of(os.getpid()) == []
    assert namespaces(os.getpid()) == []


def test_a_second_signal_kills_at_once() -> None:
    with Network(2, Shaping(10**9)) as network, hosts.StopSignals() as signals:
        began = time.monotonic()
        for delay_s in (1.0, 2.0):
            threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGTERM)).start()
        code = hosts.run_on_hosts(network.hosts, [STUBBORN, STUBBORN], cores=None, signals=signals)
        assert code == 128 + signal.SIGTERM
        assert len(signals.received) == 2
        assert time.monotonic() - began < 10
        assert hosts_of(os.getpid()) == []


def test_what_still_runs_among_the_leftovers_is_killed() -> None:
    dead = f"avgpipe-{2**22 + 1}-1-host0"  # no process has this number
    subprocess.run(["ip", "netns", "add", dead], check=True, timeout=10)
    left = subprocess.Popen(["ip", "netns", "exec", dead, "sleep", "600"])
    try:
        assert eventually(lambda: hosts_of(2**22 + 1) == [left.pid])
        assert dead in remove_leftovers()
        assert left.wait(timeout=TIMEOUT_S) == -signal.SIGKILL
        assert namespaces(2**22 + 1) == []
    finally:
        left.kill()
