"""`"num_pipelines": "auto"`: as many pipelines as are fastest by a profile of one.

M is the data loader's and stays; `avgpipe-tune` chooses it, too.
"""

from __future__ import annotations

from avgpipe_ds.announce import announce
from avgpipe_ds.config import AvgPipeConfig
from avgpipe_ds.errors import ConfigError
from avgpipe_ds.tuning.choice import best, rank
from avgpipe_ds.tuning.predictors import predictor_named
from avgpipe_ds.tuning.profile import Profile
from avgpipe_ds.tuning.setting import Setting

__all__ = ["choose_pipelines"]


def choose_pipelines(config: AvgPipeConfig, profile: Profile, *, say: bool) -> AvgPipeConfig:
    """The configuration with the N that is predicted to be fastest.

    Args:
        config: with "auto".
        profile: of one pipeline, with the M of the run.
        say: whether to log the choice.

    Raises:
        AvgPipeError: no number of pipelines fits into the memory limit.

    """
    advance = 0 if config.schedule.advance == "auto" else config.schedule.advance
    possible: dict[int, AvgPipeConfig] = {}
    for number in range(1, config.tuning.max_pipelines + 1):
        try:
            possible[number] = config.with_pipelines(number)
        except ConfigError:  # the averaging would diverge
            break
    settings = [
        Setting(num_pipelines=number, num_micro_batches=profile.num_micro_batches, advance=advance) for number in possible
    ]
    ranked = rank(profile, settings, predictor_named(config.tuning.predictor), memory_limit_gb=config.memory_limit_gb)
    chosen = best(ranked)
    if say:
        found = ", ".join(
            f"{one.prediction.setting.num_pipelines}: {one.out or f'{one.prediction.samples_per_s:.4g} samples/s'}"
            for one in sorted(ranked, key=lambda one: one.prediction.setting)
        )
        announce(f'"num_pipelines": "auto" goes on with {chosen.setting.num_pipelines}; predicted: {found}')
    return possible[chosen.setting.num_pipelines]
