"""DeepSpeed configurations that a tuning reads and writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from avgpipe_ds.config import BLOCK, AvgPipeConfig
from avgpipe_ds.errors import ConfigError
from avgpipe_ds.launching import silent
from avgpipe_ds.tuning.balance import Proposal
from avgpipe_ds.tuning.profile import Profile
from avgpipe_ds.tuning.setting import Setting

__all__ = ["check_batch", "current_setting", "profiling", "tuned"]

_NOT_PROFILED = ("num_pipelines", "schedule", "trace", "preflight")


def profiling(config: dict[str, Any], result: Path, iterations: int) -> dict[str, Any]:
    """The same for a run that ends with a profile: one pipeline in 1F1B, whose accelerators are not saturated."""
    block = {key: value for key, value in config.get(BLOCK, {}).items() if key not in _NOT_PROFILED}
    tuning = {**block.get("tuning", {}), "profile": str(result), "iterations": iterations}
    return {**silent(config), BLOCK: {**block, "tuning": tuning}}


def check_batch(config: dict[str, Any], profile: Profile) -> None:
    """A profile is of one batch size.

    Of `train_batch_size`, `train_micro_batch_size_per_gpu` and `gradient_accumulation_steps` a configuration may leave some to
    DeepSpeed, which infers them.

    Raises:
        ConfigError: `config` has another one.

    """
    micro_batch, number, whole = (
        value if isinstance(value := config.get(key), int) else None
        for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
    )
    expected = profile.batch * profile.num_replicas
    found = {whole} if whole is not None else set()
    if micro_batch is not None and (number is not None or whole is None):
        found.add(micro_batch * (number or 1) * profile.num_replicas)
    if found - {expected}:
        raise ConfigError(
            f"the profile is of batches of {expected} samples on {profile.num_replicas} replica(s), the configuration asks for"
            f" {' and '.join(map(str, sorted(found)))}: remove the profile, or name that of this configuration"
        )


def tuned(config: dict[str, Any], profile: Profile, setting: Setting, proposal: Proposal | None = None) -> dict[str, Any]:
    """The same with the setting that was chosen, and with the boundaries that are proposed."""
    schedule = {"name": "advance_forward" if setting.advance else "1f1b", "advance": setting.advance}
    block = {**config.get(BLOCK, {}), "num_pipelines": setting.num_pipelines, "schedule": schedule}
    tuning = {key: value for key, value in block.get("tuning", {}).items() if key != "profile"}
    if tuning or "tuning" in block:
        block["tuning"] = tuning
    if proposal is not None:
        block["partition"] = list(proposal.partition)
    return {
        **config,
        "train_micro_batch_size_per_gpu": profile.batch // setting.num_micro_batches,
        "gradient_accumulation_steps": setting.num_micro_batches,
        BLOCK: block,
    }


def current_setting(config: dict[str, Any], profile: Profile) -> Setting | None:
    """What `config` itself asks for; None if it leaves that open, or uses another schedule."""
    block = AvgPipeConfig.from_deepspeed(config)
    number, advance = block.num_pipelines, block.schedule.advance
    if number == "auto" or advance == "auto" or block.schedule.name == "gpipe":
        return None
    return Setting(num_pipelines=number, num_micro_batches=profile.num_micro_batches, advance=advance)
