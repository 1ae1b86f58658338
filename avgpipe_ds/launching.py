"""Start a training script as the `deepspeed` launcher would, with a copy of its configuration that asks for something else."""

from __future__ import annotations

import argparse
import copy
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import hjson
from rich.console import Console

from avgpipe_ds.config import AvgPipeConfig
from avgpipe_ds.errors import AvgPipeError, ConfigError

__all__ = ["Launch", "add_script", "read_config", "run_for_result", "silent"]

T = TypeVar("T")

_OPTION = "--deepspeed_config"
_MONITORS = ("tensorboard", "wandb", "csv_monitor", "comet")


@dataclass(frozen=True, slots=True)
class Launch:
    """A script that trains, and how it is started.

    Attributes:
        launcher: options for `deepspeed`.
        script: its path.
        arguments: its own; one of them names the configuration.

    """

    launcher: Sequence[str]
    script: str
    arguments: Sequence[str]

    @classmethod
    def of(cls, options: argparse.Namespace) -> Launch:
        """From what `add_script` added.

        Raises:
            ConfigError: the arguments name no configuration.

        """
        launch = cls(shlex.split(options.launcher), options.script, options.arguments)
        launch._place_of_config()
        return launch

    @property
    def config_file(self) -> Path:
        """The configuration that the arguments name."""
        return Path(self.arguments[self._place_of_config()].removeprefix(f"{_OPTION}="))

    def command(self, config_file: Path) -> list[str]:
        """What starts it with another configuration."""
        arguments, place = list(self.arguments), self._place_of_config()
        joined = arguments[place].startswith(f"{_OPTION}=")
        arguments[place] = f"{_OPTION}={config_file}" if joined else str(config_file)
        return [_launcher(), *self.launcher, self.script, *arguments]

    def _place_of_config(self) -> int:
        """Where in the arguments the configuration's path is."""
        for place, argument in enumerate(self.arguments):
            if argument.startswith(f"{_OPTION}="):
                return place
            if argument == _OPTION and place + 1 < len(self.arguments):
                return place + 1
        raise ConfigError(f"the script's arguments have no {_OPTION}: that is how it is told which setting to train with")


def add_script(parser: argparse.ArgumentParser) -> None:
    """Let a command take the script, its arguments and options of the launcher."""
    parser.add_argument("--launcher", default="", metavar="OPTIONS", help="for deepspeed, such as '--num_accelerators 4'")
    parser.add_argument("script", help="what trains")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=f"its arguments, {_OPTION} among them")


def read_config(file: Path) -> dict[str, Any]:
    """A configuration as DeepSpeed reads it, comments included.

    Raises:
        ConfigError: it can't be read, or its "avgpipe" block is wrong.

    """
    try:
        config = hjson.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{file}: expected an object {{...}}, as DeepSpeed's configurations are, got a {type(config).__name__}")
    plain: dict[str, Any] = copy.deepcopy(dict(config))
    AvgPipeConfig.from_deepspeed(plain)
    return plain


def silent(config: dict[str, Any]) -> dict[str, Any]:
    """The same without monitors: what is started here is no run to be recorded."""
    return {key: value for key, value in config.items() if key not in _MONITORS}


def run_for_result(
    launch: Launch,
    configure: Callable[[Path], dict[str, Any]],
    read: Callable[[Path], T],
    *,
    folder: Path,
    what: str,
    doing: str,
    hint: str,
    console: Console,
) -> T:
    """Run the script until it has written a result, and read that. Nothing is left of it.

    What the run reads and writes lies in a hidden folder, which all hosts see if they see the script.

    Args:
        launch: what to start.
        configure: its configuration, given the file that the result is to be written to.
        read: reads the file.
        folder: where the hidden folder is made.
        what: the result, as users call it.
        doing: said before it starts.
        hint: what the run has to do for a result.
        console: where that is said.

    Raises:
        AvgPipeError: it ended without a result.

    """
    try:
        hidden = tempfile.TemporaryDirectory(prefix=".avgpipe-", dir=folder.resolve())
    except OSError as error:
        raise ConfigError(f"{folder} can't be written to: {error}") from error
    with hidden as own, _signals_end_it():
        result, config = Path(own, "result.json"), Path(own, "config.json")
        config.write_text(json.dumps(configure(result)), encoding="utf-8")
        command = launch.command(config)
        console.print(f"{doing}: {shlex.join(command)}", soft_wrap=True)
        code = _run(command)
        if not result.exists():
            raise AvgPipeError(
                f"the run ended with exit status {code} and no {what}: what it printed says why. {hint}. Where a port is taken,"
                " choose another one: --launcher '--master_port 29501'"
            )
        return read(result)


def _run(command: Sequence[str]) -> int:
    """Run it in a process group of its own, which ends with this: ranks must not train on when nobody waits for them."""
    with subprocess.Popen(command, start_new_session=True) as process:
        try:
            return process.wait()
        finally:
            with _handled_by(signal.SIG_IGN, signal.SIGINT):  # whoever is impatient would leave ranks behind
                _end_group(process)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Those who do not end when they are asked to are ended."""
    for number, patience_s in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 1.0)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline and _group_exists(process):
            time.sleep(0.05)


def _group_exists(process: subprocess.Popen[bytes]) -> bool:
    process.poll()  # or it would stay as a zombie, and with it the group
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True


@contextmanager
def _signals_end_it() -> Iterator[None]:
    """Signals that would end this process at once interrupt it, so that it tidies up."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    with _handled_by(interrupt):
        yield


@contextmanager
def _handled_by(handler: Callable[[int, FrameType | None], Any] | signal.Handlers, *more: signal.Signals) -> Iterator[None]:
    """SIGTERM, SIGHUP and `more` have another handler; those that are ignored, as SIGHUP is under nohup, stay so."""
    earlier = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, *more)}
    for number, known in earlier.items():
        if known is not signal.SIG_IGN:
            signal.signal(number, handler)
    try:
        yield
    finally:
        for number, known in earlier.items():
            signal.signal(number, known)


def _launcher() -> str:
    """The `deepspeed` of this Python, whether or not its environment is activated."""
    beside = Path(sys.executable).with_name("deepspeed")
    return str(beside) if beside.exists() else "deepspeed"
