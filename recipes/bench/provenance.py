"""Where a result comes from: command, versions and machine."""

import os
import platform
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import deepspeed
import torch

import avgpipe_ds

__all__ = ["provenance"]


def provenance(arguments: Sequence[str], *, num_accelerators: int) -> dict[str, Any]:
    """What one needs to repeat a measurement, ready for JSON.

    Args:
        arguments: the script and its arguments, as in `sys.argv`.
        num_accelerators: how many the launcher started, as ranks.
    """
    versions = {
        "avgpipe_ds": avgpipe_ds.__version__,
        "commit": _commit(),
        "torch": torch.__version__,
        "deepspeed": deepspeed.__version__,
        "python": platform.python_version(),
    }
    return {
        "command": _command(arguments, num_accelerators),
        "versions": {name: version for name, version in versions.items() if version},
        "machine": {"cpu": _cpu_model(), "cores": os.cpu_count()},
    }


def _command(arguments: Sequence[str], num_accelerators: int) -> str:
    """The command line, without what the launcher adds."""
    own = [argument for argument in arguments if not argument.startswith("--local_rank")]
    launcher = os.environ.get("AVGPIPE_CLUSTER") or f"deepspeed --num_accelerators {num_accelerators}"
    return f"{launcher} {shlex.join(own)}"


def _commit() -> str | None:
    """Of this checkout, "-dirty" if something in it is not committed; None outside of one."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
