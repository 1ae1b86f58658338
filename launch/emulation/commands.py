"""Calls of the system's network tools."""

import os
import subprocess
from collections.abc import Sequence

__all__ = ["CommandError", "run", "search_path"]

_TIMEOUT_S = 30


class CommandError(RuntimeError):
    """A system tool failed; the message holds the command and what the tool said."""


def search_path() -> str:
    """`PATH` and where `ip` and `tc` live, which the path of many users, and of root after a plain `su`, leaves out."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


def run(command: Sequence[str]) -> str:
    """Run a tool to its end and return what it printed.

    It gets a session of its own: Ctrl-C goes to everything in the terminal's foreground, and would cut short the very commands
    that tidy up.

    Raises:
        CommandError: the tool failed or hung.
    """
    environment = os.environ | {"PATH": search_path(), "LC_ALL": "C"}
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            start_new_session=True,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CommandError(f"`{' '.join(command)}` failed: {error}") from error
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip()
        raise CommandError(f"`{' '.join(command)}` failed with exit code {done.returncode}: {said}")
    return done.stdout
