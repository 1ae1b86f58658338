"""What a tuning prints: the best settings, the present one, and why others are out."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from avgpipe_ds.tuning.choice import Candidate
from avgpipe_ds.tuning.profile import Profile
from avgpipe_ds.tuning.setting import Setting

__all__ = ["table"]

_BEST = 8
_OUT = 4
_MIB = 2**20


def table(ranked: Sequence[Candidate], profile: Profile, present: Setting | None) -> Table:
    """The best few settings of those that fit, the present one, and the fastest of those that do not fit.

    Args:
        ranked: as `rank` sorts them.
        profile: what they were predicted from.
        present: that of the configuration, which the others are compared with.

    """
    fitting = [one for one in ranked if not one.out]
    others = [one for one in ranked if one.out]
    present_s = next((one.prediction.samples_per_s for one in ranked if one.prediction.setting == present), None)
    shown = [*fitting[:_BEST], *(one for one in fitting[_BEST:] if one.prediction.setting == present), *others[:_OUT]]
    result = Table(title=f"predicted for B = {profile.batch} over K = {len(profile.stages)} stages", title_justify="left")
    for column in ("N", "M", "samples each", "advance", "samples/s", "x present", "MiB by stage"):
        result.add_column(column, justify="right")
    result.add_column("out, because")
    for one in shown:
        setting, speed = one.prediction.setting, one.prediction.samples_per_s
        result.add_row(
            str(setting.num_pipelines),
            str(setting.num_micro_batches),
            str(profile.batch // setting.num_micro_batches),
            str(setting.advance),
            f"{speed:.4g}",
            "-" if present_s is None else f"{speed / present_s:.2f}",
            " ".join(f"{stage.total / _MIB:.0f}" for stage in one.prediction.memory),
            one.out,
            style="bold" if setting == present else None,
        )
    left_out = len(ranked) - len(shown)
    result.caption = f"{left_out} more settings are slower or do not fit; bold: the present one" if left_out else None
    return result
