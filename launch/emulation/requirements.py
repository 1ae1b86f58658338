"""What the machine must have, checked before anything is changed."""

import os
import shutil
import sys
from collections.abc import Callable, Sequence

from emulation.commands import CommandError, run, search_path

__all__ = ["missing"]

_TOOLS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "setpriv": "util-linux", "taskset": "util-linux"}

_KERNEL_PARTS = {
    "veth": ("ip link add one type veth peer name two", "veth", "CONFIG_VETH"),
    "bridge": ("ip link add one type bridge", "bridge", "CONFIG_BRIDGE"),
    "tbf": ("tc qdisc add dev lo root tbf rate 1mbit burst 4kb latency 1ms", "sch_tbf", "CONFIG_NET_SCH_TBF"),
}

# A namespace that is gone when the command in it ends: a place to try things without leaving a trace.
_THROWAWAY = ("unshare", "--net", "--mount")


def _find(tool: str) -> str | None:
    return shutil.which(tool, path=search_path())


def missing(
    *,
    platform: str = sys.platform,
    user_id: Callable[[], int] = lambda: os.geteuid(),  # looked up late: not every platform has it
    find: Callable[[str], str | None] = _find,
    attempt: Callable[[Sequence[str]], str] = run,
) -> list[str]:
    """What is missing and how to get it, one sentence each; empty if the cluster can be made.

    Args:
        platform: as `sys.platform`.
        user_id: as `os.geteuid`.
        find: where a tool is, or None.
        attempt: runs a command, raising `CommandError`.
    """
    if not platform.startswith("linux"):
        return [f"Linux: hosts are network namespaces, which {platform} does not have. Use a Linux machine or a virtual one."]
    found = []
    if user_id() != 0:
        found.append('root, to make network namespaces: sudo -E env "PATH=$PATH" python launch/cluster.py ...')
    for tool, package in _TOOLS.items():
        if find(tool) is None:
            found.append(f"the command `{tool}`: on Debian and Ubuntu, apt-get install {package}")
    return found or _missing_in_kernel(attempt)


def _missing_in_kernel(attempt: Callable[[Sequence[str]], str]) -> list[str]:
    try:
        attempt([*_THROWAWAY, "true"])
    except CommandError as error:
        return [
            "the right to make network namespaces, which root lacks here. In a container, start it with --privileged or with "
            f"--cap-add SYS_ADMIN --cap-add NET_ADMIN --security-opt apparmor=unconfined ({error})"
        ]
    found = []
    for part, (command, module, option) in _KERNEL_PARTS.items():
        try:
            attempt([*_THROWAWAY, *command.split()])
        except CommandError as error:
            found.append(
                f"{part} in the kernel: `modprobe {module}`, if need be after apt-get install linux-modules-extra-$(uname -r); "
                f"otherwise a kernel with {option} ({error})"
            )
    return found
