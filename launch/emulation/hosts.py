"""Runs one command on every host, as if each were a machine of its own.

Host 0 writes straight to the terminal, so that progress bars and tables look as they always do; what the others write gets their
name in front of it, line by line.

Stopping has three parts. A host that fails, or a signal, asks all hosts to end, as DeepSpeed's launcher asks its processes. Who
does not end in time, or has left processes behind, is killed: all that runs in its namespace. And should this process itself be
killed, the kernel sends every host the request to end.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import IO, Any, TextIO

from emulation.commands import search_path
from emulation.network import INTERFACE, Host, end_processes

__all__ = ["StopSignals", "cores_of_hosts", "run_on_hosts", "say"]

_GRACE_S = 35  # DeepSpeed's launcher gives its own processes 30 s
_LOOK_S = 0.1

_OUTPUT_LOCK = threading.Lock()


class StopSignals:
    """Notes the signals that ask for an end, inside the `with` block, instead of letting them interrupt it.

    An exception out of a signal's handler could come at any point, and so also in the middle of tidying up. One that whoever
    started this process had it ignore (`nohup`) stays ignored.

    Attributes:
        received: their numbers, in order.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)


def cores_of_hosts(num_hosts: int, cores_per_host: int, *, available: Sequence[int]) -> list[list[int]] | None:
    """Cores for each host, no two hosts sharing one; None if there are not enough.

    Args:
        num_hosts: K, or how many machines shall hold the K stages.
        cores_per_host: one per accelerator.
        available: their numbers.
    """
    if num_hosts * cores_per_host > len(available):
        return None
    return [list(available[i * cores_per_host : (i + 1) * cores_per_host]) for i in range(num_hosts)]


def run_on_hosts(
    hosts: Sequence[Host], commands: Sequence[Sequence[str]], *, cores: Sequence[Sequence[int]] | None, signals: StopSignals
) -> int:
    """Run a command on each host until all have ended, or one has failed, or a signal came; then none runs any more.

    Args:
        hosts: of a network that exists.
        commands: one for each host.
        cores: which ones each host may use; None for all.
        signals: entered.

    Returns:
        The exit code: 0, that of the first host to fail, or 128 and the signal's number.
    """
    running: list[_Running] = []
    stop_with: int = signal.SIGTERM
    try:
        for host, command in zip(hosts, commands, strict=True):
            running.append(_start(host, command, None if cores is None else cores[host.index]))
        code = _watch(running, signals)
        if signals.received:
            stop_with = signals.received[0]
        return code
    finally:
        _stop(running, stop_with, signals)


@dataclass(frozen=True, slots=True)
class _Running:
    host: Host
    process: "subprocess.Popen[str]"
    relays: list[threading.Thread] = field(default_factory=list)


def _start(host: Host, command: Sequence[str], cores: Sequence[int] | None) -> _Running:
    whole = ["ip", "netns", "exec", host.namespace, "setpriv", "--pdeathsig", "TERM"]
    if cores is not None:
        whole += ["taskset", "--cpu-list", ",".join(map(str, cores))]
    # A terminal belongs to the first host, whose progress bars need it. Elsewhere its lines must be whole, too.
    sinks = [None if host.index == 0 and sink.isatty() else sink for sink in (sys.stdout, sys.stderr)]
    stdout, stderr = (None if sink is None else subprocess.PIPE for sink in sinks)
    process = subprocess.Popen(
        [*whole, *command],
        env=os.environ | _environment(host),
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C comes from here, once, and not from the terminal as well
    )
    running = _Running(host, process)
    prefix = f"[host {host.index}] " if host.index else ""
    for stream, sink in zip((process.stdout, process.stderr), sinks, strict=True):
        if stream is not None:
            relay = threading.Thread(target=_relay, args=(stream, sink, prefix), daemon=True)
            relay.start()
            running.relays.append(relay)
    return running


def _environment(host: Host) -> dict[str, str]:
    return {
        "PATH": search_path(),
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "NCCL_SOCKET_IFNAME": f"={INTERFACE}",
        # All hosts have this machine's name, by which NCCL would know that they share memory, and go past the network.
        "NCCL_HOSTID": host.namespace,
        # Nor shall it find the machine's real network cards.
        "NCCL_NET": "Socket",
    }


def _relay(stream: IO[str], sink: TextIO, prefix: str) -> None:
    try:
        with stream:
            for line in stream:
                with _OUTPUT_LOCK:
                    sink.write(prefix + line.rstrip("\n") + "\n")
                    sink.flush()
    except BrokenPipeError:
        pass  # nobody reads any more; the host will notice as well, since its stream is closed now


def _watch(running: Sequence[_Running], signals: StopSignals) -> int:
    while not signals.received:
        codes = [one.process.poll() for one in running]
        for one, code in zip(running, codes, strict=True):
            if code:
                code = code if code > 0 else 128 - code
                say(f"host {one.host.index} ended with exit code {code}: stopping all hosts")
                return code
        if all(code == 0 for code in codes):
            return 0
        time.sleep(_LOOK_S)
    number = signals.received[0]
    say(f"received {signal.Signals(number).name}: stopping all hosts; once more to kill them")
    return 128 + number


def _stop(running: Sequence[_Running], number: int, signals: StopSignals) -> None:
    alive = [one for one in running if one.process.poll() is None]
    for one in alive:
        one.process.send_signal(number)
    told, deadline = len(signals.received), time.monotonic() + _GRACE_S
    while any(one.process.poll() is None for one in alive) and time.monotonic() < deadline and len(signals.received) == told:
        time.sleep(_LOOK_S)
    for one in running:
        end_processes(one.host.namespace)
        one.process.wait()
        for relay in one.relays:
            relay.join(timeout=5)  # its stream ends with the last process that holds it


def say(text: str) -> None:
    """Print a line of the cluster's own, apart from what the hosts write."""
    with _OUTPUT_LOCK:
        print(f"[cluster] {text}", file=sys.stderr, flush=True)
