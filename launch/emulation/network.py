"""Hosts as network namespaces, each with one shaped link to a switch.

    namespace avgpipe-PID-START-host0         namespace avgpipe-PID-START-switch
      lo, eth0 10.0.0.1  <------ veth ------>  port0 ─┐
    namespace avgpipe-PID-START-host1                 ├─ bridge
      lo, eth0 10.0.0.2  <------ veth ------>  port1 ─┘

Each end of a link is shaped where it sends, which makes both directions. The switch has a namespace of its own, so nothing at
all is put into the machine's own network: interface names and addresses may be the same in every cluster, firewall rules don't
apply, and to delete the namespaces is to remove everything, as the kernel takes devices and queues away with them.

Only the names outlive a process that was killed. They say which process it was, by its number and its start time (numbers are
used again), so whoever comes later can tell what the dead have left from what the living use.
"""

import os
import re
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from emulation.commands import CommandError, run
from emulation.shaping import Shaping

__all__ = ["INTERFACE", "MAX_HOSTS", "Host", "Network", "end_processes", "remove_leftovers"]

INTERFACE = "eth0"
"""The name of every host's only link."""

MAX_HOSTS = 254
"""The network is 10.0.0.0/24."""

# Each machine has its own default. BBR, that of some, estimates the rate from round trips, which are too short and irregular
# here, and loses up to a third of it when the cores are busy. Reno is in every kernel, and over round trips of a tenth of a
# millisecond there is nothing that Cubic does better.
_CONGESTION_CONTROL = "reno"
_CONGESTION_CONTROL_FILE = "/proc/sys/net/ipv4/tcp_congestion_control"

_NAME = re.compile(r"avgpipe-(\d+)-(\d+)-(?:switch|host\d+)")


@dataclass(frozen=True, slots=True)
class Host:
    """One host of the cluster.

    Attributes:
        index: from 0.
        namespace: name of its network namespace, as `ip netns` knows it.
        address: IPv4, of its only link.
    """

    index: int
    namespace: str
    address: str


class Network:
    """The namespaces and links, from `with` to the end of the block, however it ends.

    Args:
        num_hosts: from 1 to `MAX_HOSTS`.
        shaping: of every link, in both directions.

    Raises:
        CommandError: on entering, where a tool failed; what had been made by then is removed.
    """

    def __init__(self, num_hosts: int, shaping: Shaping) -> None:
        """Choose names and addresses; changes nothing yet."""
        pid = os.getpid()
        cluster = f"avgpipe-{pid}-{_start_time(pid)}"
        self.switch = f"{cluster}-switch"
        self.hosts = tuple(Host(i, f"{cluster}-host{i}", f"10.0.0.{i + 1}") for i in range(num_hosts))
        self._shaping = shaping

    def __enter__(self) -> "Network":
        try:
            for command in self.commands():
                run(command)
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.remove()

    def commands(self) -> Iterator[list[str]]:
        """What makes the network, in order."""
        yield ["ip", "netns", "add", self.switch]
        yield ["ip", "-n", self.switch, "link", "add", "bridge", "type", "bridge"]
        yield ["ip", "-n", self.switch, "link", "set", "bridge", "addrgenmode", "none", "up"]
        for host in self.hosts:
            yield from self._host_commands(host, port=f"port{host.index}")

    def remove(self) -> None:
        """End what still runs in the namespaces and delete them."""
        _remove([self.switch, *(host.namespace for host in self.hosts)])

    def _host_commands(self, host: Host, port: str) -> Iterator[list[str]]:
        yield ["ip", "netns", "add", host.namespace]
        yield ["ip", "-n", host.namespace, "link", "set", "lo", "up"]
        # Before any socket is made there, as each takes over what is set at the time.
        yield ["ip", "netns", "exec", host.namespace, "sh", "-c", f"echo {_CONGESTION_CONTROL} > {_CONGESTION_CONTROL_FILE}"]
        peer = ["peer", "name", port, "netns", self.switch]
        yield ["ip", "link", "add", INTERFACE, "netns", host.namespace, "type", "veth", *peer]
        for namespace, device in ((host.namespace, INTERFACE), (self.switch, port)):
            # No IPv6 address of its own making: gloo and NCCL take the first address they find.
            yield ["ip", "-n", namespace, "link", "set", device, "addrgenmode", "none", *self._shaping.link_options()]
            yield ["tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *self._shaping.qdisc()]
        yield ["ip", "-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", INTERFACE]
        yield ["ip", "-n", self.switch, "link", "set", port, "master", "bridge", "up"]
        yield ["ip", "-n", host.namespace, "link", "set", INTERFACE, "up"]


def end_processes(namespace: str) -> None:
    """Kill everything that runs in a namespace, also what its parents have lost sight of."""
    with suppress(CommandError):  # it is gone already
        for pid in run(["ip", "netns", "pids", namespace]).split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


def remove_leftovers() -> list[str]:
    """Remove the namespaces of clusters whose process is dead; returns their names. Those of living ones stay."""
    left = [name for name in _namespaces() if (found := _NAME.fullmatch(name)) and _start_time(int(found[1])) != int(found[2])]
    _remove(left)
    return left


def _remove(namespaces: list[str]) -> None:
    there = _namespaces()
    for namespace in namespaces:
        if namespace in there:
            end_processes(namespace)
            try:
                run(["ip", "netns", "delete", namespace])
            except CommandError:
                # Another start may have been quicker to remove a dead run's. If not, go on with the others and say so at the end.
                continue
    if still := sorted(set(namespaces) & set(_namespaces())):
        raise CommandError(f"could not delete the network namespaces {', '.join(still)}: try `ip netns delete` by hand")


def _namespaces() -> list[str]:
    """Names of all namespaces; `ip` adds an id to some."""
    return [line.split()[0] for line in run(["ip", "netns", "list"]).splitlines() if line.strip()]


def _start_time(pid: int) -> int | None:
    """When a process was started, in the kernel's ticks since boot; None if there is none with this number."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field is the program's name in parentheses, which may itself hold spaces and parentheses.
    return int(text.rpartition(")")[2].split()[19])
