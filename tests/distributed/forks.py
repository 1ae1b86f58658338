"""Whole lives of processes, from a fork to the exit code, without paying for the imports each time.

`Forks().run(size, "module:function")` forks `size` ranks from a process that has imported DeepSpeed and nothing more. Each
rank runs the function as a script would: what it raises ends the interpreter in the usual way, with a traceback, `atexit` and the
finalisation of threads and process groups. That end is what is tested.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HUNG = "hung"


@dataclass(frozen=True)
class Ended:
    """How a rank ended.

    Attributes:
        code: exit code, negative for a signal, `HUNG` if it had to be killed.
        output: what it wrote to stdout and stderr.
        seconds: since all were started.
    """

    code: int | str
    output: str
    seconds: float


class Forks:
    """A process to fork from; started when first used."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run(self, size: int, case: str, *args: Any, timeout_s: float = 60.0) -> list[Ended]:
        """The ends of `size` ranks that each run `case`, "module:function", with `args`. No process is left afterwards."""
        if self._process is None:
            environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
            command = [sys.executable, "-m", "tests.distributed.forks"]
            root = Path(__file__).parents[2]
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(command, cwd=root, env=environment, stdin=pipe, stdout=pipe, text=True)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([size, case, args, timeout_s]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the process to fork from has died"
        return [Ended(*end) for end in json.loads(line)]

    def stop(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def _serve() -> Callable[[], None] | None:
    """Fork as asked until stdin ends; in a fork, return what it is to run."""
    answers = os.fdopen(os.dup(1), "w")
    while line := sys.stdin.readline():
        size, case, args, timeout_s = json.loads(line)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        logs = [tempfile.TemporaryFile("w+") for _ in range(size)]  # noqa: SIM115
        pids: dict[int, int] = {}
        started = time.monotonic()
        for rank in range(size):
            pid = os.fork()
            if not pid:
                os.dup2(logs[rank].fileno(), 1)
                os.dup2(logs[rank].fileno(), 2)
                sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # errors and output in the order of events
                _become(rank, size, port)
                return _find(case, args)
            pids[rank] = pid
        ends = _await(pids, started, timeout_s)
        for rank, log in enumerate(logs):
            log.seek(0)
            ends[rank][1] = log.read()
            log.close()
        answers.write(json.dumps([ends[rank] for rank in range(size)]) + "\n")
        answers.flush()
    return None


def _await(pids: dict[int, int], started: float, timeout_s: float) -> dict[int, list[Any]]:
    ends: dict[int, list[Any]] = {}
    while len(ends) < len(pids):
        late = time.monotonic() - started > timeout_s
        for rank, pid in pids.items():
            if rank in ends:
                continue
            if late:
                os.kill(pid, signal.SIGKILL)
            done, status = os.waitpid(pid, 0 if late else os.WNOHANG)
            if done:
                ends[rank] = [HUNG if late else os.waitstatus_to_exitcode(status), "", time.monotonic() - started]
        time.sleep(0.01)
    return ends


def _become(rank: int, size: int, port: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def _find(case: str, args: list[Any]) -> Callable[[], None]:
    module, name = case.split(":")
    function = getattr(importlib.import_module(module), name)
    return lambda: function(*args)


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    import avgpipe_ds.initialization  # noqa: F401

    what = _serve()
    if what is not None:
        what()
