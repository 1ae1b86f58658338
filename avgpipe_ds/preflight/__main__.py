"""`avgpipe-check [options] train.py --deepspeed_config c.json ...`: check a training before it costs anything.

It starts the script as the `deepspeed` launcher would, with a copy of the configuration. In its first `train_batch` the engine
sends one micro-batch through the stages and back, and ends the script; then what was found is printed. The exit status is 0 if
the model can train, 1 if it can't, or if the script ended before.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from avgpipe_ds.config import BLOCK
from avgpipe_ds.errors import AvgPipeError, ConfigError
from avgpipe_ds.launching import Launch, add_script, read_config, run_for_result, silent
from avgpipe_ds.preflight.report import Report
from avgpipe_ds.preflight.table import view

__all__ = ["checking", "main"]


def main(arguments: list[str] | None = None) -> None:
    """Run the script up to its check, and print what was found."""
    parser = argparse.ArgumentParser(
        prog="avgpipe-check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found into this file, too")
    add_script(parser)
    options = parser.parse_args(arguments)
    try:
        report = _check(options)
    except (AvgPipeError, ConfigError) as error:
        parser.exit(1, f"avgpipe-check: {error}\n")
    except KeyboardInterrupt:
        parser.exit(130, "avgpipe-check: interrupted\n")
    parser.exit(1 if report.errors else 0)


def _check(options: argparse.Namespace) -> Report:
    console, launch = Console(), Launch.of(options)
    config = read_config(launch.config_file)
    report = run_for_result(
        launch,
        lambda result: checking(config, result),
        Report.load,
        folder=launch.config_file.parent,
        what="check",
        doing="checking",
        hint="It has to come to its first train_batch, with data for it, with the configuration that --deepspeed_config names",
        console=console,
    )
    console.print(view(report))
    if options.json is not None:
        try:
            report.save(options.json)
        except OSError as error:
            raise ConfigError(f"can't write {options.json}: {error}") from error
    return report


def checking(config: dict[str, Any], result: Path) -> dict[str, Any]:
    """The same configuration for a run that ends with a check, and writes what it found into a file."""
    tuning = {key: value for key, value in config.get(BLOCK, {}).get("tuning", {}).items() if key != "profile"}
    block = {key: value for key, value in config.get(BLOCK, {}).items() if key not in ("trace", "tuning")}
    return {**silent(config), BLOCK: {**block, **({"tuning": tuning} if tuning else {}), "preflight": str(result)}}


if __name__ == "__main__":
    main(sys.argv[1:])
