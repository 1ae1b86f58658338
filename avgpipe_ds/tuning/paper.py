"""Prediction by the paper's formulas (section 5.2.2), as docs/tuning.md reconstructs them.

They describe accelerators that compute for several pipelines at the same time, as GPUs do with kernels that leave room, and
pipelines that fill and drain together. Pipelines that run freely fill each other's bubbles, which the formulas do not see; the
paper asks of them only that they put settings into the right order.
"""

from __future__ import annotations

from avgpipe_ds.tuning.profile import Profile, StageProfile
from avgpipe_ds.tuning.setting import Setting

__all__ = ["PaperPredictor"]


class PaperPredictor:
    """Scales utilisation, time and messages of the profile's micro-batch, or of a smaller one if that is saturated, to another
    N and M. The advance counts as enough (as GPipe).
    """

    name = "paper"

    def iteration_s(self, profile: Profile, setting: Setting) -> float:
        """The slowest stage's computing, blocking messages and bubble."""
        number, slices = setting.num_pipelines, setting.num_micro_batches
        bubble_s = slowest_s = 0.0
        for stage in profile.stages:
            compute_s = _compute_s(profile, stage, setting)
            scale = profile.num_micro_batches / slices
            messages_s = number * slices * (stage.activation.seconds(scale) + stage.gradient.seconds(scale))
            first_s = messages_s / slices
            blocking_s = first_s + max(0.0, messages_s - first_s - compute_s)
            slowest_s = max(slowest_s, compute_s + blocking_s + bubble_s)
            bubble_s += (compute_s + messages_s) / slices
        return slowest_s


def _compute_s(profile: Profile, stage: StageProfile, setting: Setting) -> float:
    """T_gpu*: as many times more launches as micro-batches; where the demand passes 100 %, the excess takes longer."""
    samples = profile.base_samples
    base_slices = profile.batch / samples
    demand = setting.num_pipelines * base_slices / setting.num_micro_batches * stage.utilisation_at(samples)
    return setting.num_micro_batches * (stage.forward_s(samples) + stage.backward_s(samples)) * max(1.0, demand)
