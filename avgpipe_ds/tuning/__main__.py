"""`avgpipe-tune [options] train.py --deepspeed_config c.json ...`: choose N, M and the advance from one short profile.

It starts the script as the `deepspeed` launcher would, with a copy of the configuration. The engine profiles its first iterations
and ends the script; then all settings that divide the batch are predicted, and the best one that fits into memory is written as a
configuration that trains with it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from avgpipe_ds.atomic import replacing
from avgpipe_ds.config import AvgPipeConfig
from avgpipe_ds.errors import AvgPipeError, ConfigError
from avgpipe_ds.launching import Launch, add_script, read_config, run_for_result
from avgpipe_ds.tuning.balance import propose_partition
from avgpipe_ds.tuning.choice import best, rank
from avgpipe_ds.tuning.configuration import check_batch, current_setting, profiling, tuned
from avgpipe_ds.tuning.predictors import PREDICTORS, predictor_named
from avgpipe_ds.tuning.profile import Profile
from avgpipe_ds.tuning.setting import candidates
from avgpipe_ds.tuning.table import table

_MOST_PIPELINES = 64
"""Each of them is predicted; as many as no accelerator holds."""


def main(arguments: list[str] | None = None) -> None:
    """Profile, predict, print a table, and write the configuration."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        _tune(options)
    except (AvgPipeError, ConfigError) as error:
        parser.exit(1, f"avgpipe-tune: {error}\n")
    except KeyboardInterrupt:
        parser.exit(130, "avgpipe-tune: interrupted; nothing was written\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="avgpipe-tune", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    positive, up_to = partial(_number, least=1), partial(_number, least=1, most=_MOST_PIPELINES)
    parser.add_argument("--predictor", choices=PREDICTORS, help="default: the configuration's, or simulation")
    parser.add_argument("--max-pipelines", type=up_to, metavar="N", help="the largest N (default: the configuration's, or 4)")
    parser.add_argument(
        "--max-advance", type=partial(_number, least=0), default=2, metavar="A", help="the largest advance (default 2)"
    )
    parser.add_argument("--memory-limit-gb", type=float, metavar="GB", help="per accelerator (default: the configuration's)")
    parser.add_argument("--iterations", type=positive, help="to be profiled (default: the configuration's, or 20)")
    parser.add_argument("--output", type=Path, help="the configuration to write (default: c.tuned.json beside c.json)")
    parser.add_argument("--profile", type=Path, help="keep the profile in this file, and take it from there if it exists")
    parser.add_argument(
        "--write-partition",
        action="store_true",
        help="write better stage boundaries, too; the script has to give avgpipe_ds.partition_of(config) to its model",
    )
    add_script(parser)
    return parser


def _tune(options: argparse.Namespace) -> None:
    console = Console()
    launch = Launch.of(options)
    file = launch.config_file
    config = read_config(file)
    output: Path = options.output or file.with_suffix(".tuned.json")
    _check_writable(output, "--output")
    if options.profile is not None:
        _check_writable(options.profile, "--profile")
    block = AvgPipeConfig.from_deepspeed(config)
    limit = block.memory_limit_gb if options.memory_limit_gb is None else options.memory_limit_gb
    if limit is not None and not limit > 0:
        raise ConfigError(f"--memory-limit-gb must be above 0, got {limit}")
    profile = _profile(options, config, launch, output.parent, console)
    check_batch(config, profile)
    settings = candidates(
        profile.batch,
        num_stages=len(profile.stages),
        max_pipelines=_most_pipelines(block, options.max_pipelines or block.tuning.max_pipelines),
        max_advance=options.max_advance,
    )
    predictor = predictor_named(options.predictor or block.tuning.predictor)
    ranked = rank(profile, track(list(settings), "predicting"), predictor, memory_limit_gb=limit)
    console.print(table(ranked, profile, current_setting(config, profile)))
    chosen = best(ranked).setting
    if profile.saturated:
        console.print(f"micro-batches of {profile.micro_batch:g} samples saturate an accelerator; smaller ones were tried, too")
    proposal = propose_partition(profile, chosen, memory_limit=None if limit is None else limit * 1e9)
    if proposal is not None:
        how = "as the configuration says now" if options.write_partition else "--write-partition puts that into the configuration"
        console.print(
            f"the stages are uneven: cut at layers {list(proposal.partition)}, the slowest takes {proposal.gain:.0%} less; {how}"
        )
    written = tuned(config, profile, chosen, proposal if options.write_partition else None)
    _write(output, json.dumps(written, indent=2) + "\n")
    console.print(f"{output} trains with {chosen}")


def _most_pipelines(block: AvgPipeConfig, wanted: int) -> int:
    """The largest N up to `wanted` that the averaging of the configuration can have."""
    for number in range(1, wanted + 1):
        try:
            block.with_pipelines(number)
        except ConfigError:
            return number - 1
    return wanted


def _profile(options: argparse.Namespace, config: dict[str, Any], launch: Launch, folder: Path, console: Console) -> Profile:
    """Of a run that is started for it, or of the file that --profile names."""
    kept: Path | None = options.profile
    if kept is not None and kept.exists():
        known = Profile.load(kept)
        console.print(f"profile of {kept}: {known}", soft_wrap=True)
        return known
    iterations = options.iterations or AvgPipeConfig.from_deepspeed(config).tuning.iterations
    profile = run_for_result(
        launch,
        lambda result: profiling(config, result, iterations),
        Profile.load,
        folder=folder,
        what="profile",
        doing="profiling",
        hint=f"It has to train at least {iterations + 2} iterations with the configuration that --deepspeed_config names",
        console=console,
    )
    if kept is not None:
        _write(kept, profile.model_dump_json(indent=2) + "\n")
    return profile


def _check_writable(file: Path, option: str) -> None:
    """Better now than after a run."""
    if not file.parent.is_dir():
        raise ConfigError(f"{option} {file}: there is no folder {file.parent}")
    if file.is_dir() or not os.access(file.parent, os.W_OK):
        raise ConfigError(f"{option} {file}: {'is a folder' if file.is_dir() else f'{file.parent} can not be written to'}")


def _write(file: Path, text: str) -> None:
    """All of it or nothing."""
    try:
        with replacing(file) as part:
            part.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"can't write {file}: {error}") from error


def _number(text: str, *, least: int, most: int | None = None) -> int:
    if not text.isdecimal() or not least <= int(text) <= (most or int(text)):
        raise argparse.ArgumentTypeError(f"expected an integer from {least}{f' to {most}' if most else ''}, got {text!r}")
    return int(text)


if __name__ == "__main__":
    main(sys.argv[1:])
