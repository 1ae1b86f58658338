"""Worlds of real processes over gloo that run many cases each: importing DeepSpeed takes ten seconds, a case a fraction of one.

`World(size).run(function, *args)` calls `function(*args)` on every rank and returns the results by rank. The function must be
importable, and everything passed and returned picklable. A case that raises, hangs or kills a process ends its world; the next
case gets a new one.
"""

from __future__ import annotations

import gc
import os
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

START_TIMEOUT_S = 180.0


class CaseFailed(AssertionError):
    """A case raised; `errors` has the tracebacks by rank."""

    def __init__(self, errors: dict[int, str]) -> None:
        super().__init__("\n".join(f"--- rank {rank} ---\n{text}" for rank, text in sorted(errors.items())))
        self.errors = errors


class CaseHung(AssertionError):
    """A case did not end within its time limit."""


class World:
    """`size` processes that share a `torch.distributed` world."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = 90.0) -> list[Any]:
        """Results of `function(*args)` by rank.

        Raises:
            CaseFailed: a rank raised, or its process died.
            CaseHung: not all ranks were done in time.
        """
        try:
            if not self._processes:
                self._start()
            for pipe in self._pipes:
                pipe.send((function, args))
            results, errors = self._collect(timeout_s)
        except BaseException:  # pytest's own time limit, or a user's interrupt: results that come later belong to no case
            self.stop()
            raise
        if errors:
            self.stop()
            raise CaseFailed(errors)
        return [results[rank] for rank in range(self.size)]

    def stop(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        context = get_context("spawn")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for rank in range(self.size):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.size, port, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(mine)
        _, errors = self._collect(START_TIMEOUT_S)
        if errors:
            self.stop()
            raise CaseFailed(errors)

    def _collect(self, timeout_s: float) -> tuple[dict[int, Any], dict[int, str]]:
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        deadline = time.monotonic() + timeout_s
        while len(results) + len(errors) < self.size:
            waiting = [pipe for rank, pipe in enumerate(self._pipes) if rank not in results and rank not in errors]
            ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                missing = sorted(set(range(self.size)) - set(results) - set(errors))
                self.stop()
                raise CaseHung(f"ranks {missing} were not done after {timeout_s} s; errors of the others: {errors}")
            for pipe in ready:
                rank = self._pipes.index(pipe)
                try:
                    error, value = pipe.recv()
                except EOFError:
                    errors[rank] = "the process died"
                    continue
                if error:
                    errors[rank] = error
                else:
                    results[rank] = value
        return results, errors


def _serve(rank: int, size: int, port: int, pipe: Connection) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    log = tempfile.NamedTemporaryFile("w", prefix=f"avgpipe-test-rank{rank}-", suffix=".log", delete=False)  # noqa: SIM115
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    try:
        import torch

        torch.set_num_threads(1)
        import avgpipe_ds

        avgpipe_ds.init_distributed(dist_backend="gloo")
        from deepspeed.utils import groups

        groups._get_data_parallel_group()  # DeepSpeed makes it once and keeps it
        kept = _process_groups()
        pipe.send((None, None))
    except BaseException:  # noqa: BLE001
        pipe.send((traceback.format_exc(), None))
        raise
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            result = function(*args)
            _release_process_groups(kept)
            pipe.send((None, result))
        except BaseException:  # noqa: BLE001 - reported to the test
            pipe.send((traceback.format_exc(), None))


def _process_groups() -> set[Any]:
    import torch.distributed as dist

    return set(dist.distributed_c10d._world.pg_map)


def _release_process_groups(kept: set[Any]) -> None:
    """Destroy a case's groups: DeepSpeed keeps them, and each has a thread of gloo's that wakes a hundred times a second."""
    import torch.distributed as dist
    from deepspeed.runtime.pipe import p2p
    from deepspeed.utils import groups

    groups.mpu = p2p._grid = None  # DeepSpeed keeps the topology of the last pipeline here, and with it its groups
    gc.collect()
    for group in _process_groups() - kept:
        dist.destroy_process_group(group)
