"""What a profile says of a setting that was not tried: time by one of two predictors, memory by counting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from avgpipe_ds.memory.breakdown import Breakdown, largest
from avgpipe_ds.schedules.plans import most_stored
from avgpipe_ds.tuning.profile import Profile
from avgpipe_ds.tuning.setting import Setting
from avgpipe_ds.tuning.simulated import simulated

__all__ = ["Prediction", "Predictor", "predict", "predict_memory"]


class Predictor(Protocol):
    """Predicts the time of an iteration, in which each of N pipelines trains a batch."""

    name: str

    def iteration_s(self, profile: Profile, setting: Setting) -> float:
        """Seconds in steady state."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What is expected of a setting.

    Attributes:
        setting: which one.
        iteration_s: seconds of an iteration, N B samples.
        samples_per_s: N B / iteration_s.
        memory: of each stage, if the pipelines interleave as in the simulator.
        bound: of each stage, however they interleave.

    """

    setting: Setting
    iteration_s: float
    samples_per_s: float
    memory: tuple[Breakdown, ...]
    bound: tuple[Breakdown, ...]

    @property
    def peak_bytes(self) -> int:
        """Of the stage that may need most."""
        return largest(self.bound)


def predict(profile: Profile, setting: Setting, predictor: Predictor) -> Prediction:
    """Time and memory of a setting."""
    iteration_s = predictor.iteration_s(profile, setting)
    return Prediction(
        setting=setting,
        iteration_s=iteration_s,
        samples_per_s=setting.num_pipelines * profile.batch / iteration_s,
        memory=predict_memory(profile, setting, simulated(profile, setting)[1]),
        bound=predict_memory(profile, setting, most_stored(setting.plans(len(profile.stages)), setting.num_pipelines)),
    )


def predict_memory(profile: Profile, setting: Setting, stored: Sequence[int]) -> tuple[Breakdown, ...]:
    """Bytes of each stage (paper, section 5.2.2): N models with gradients and optimizer, a reference, and what is stored.

    Args:
        profile: of the sizes.
        setting: of N and M.
        stored: by stage, micro-batches of all pipelines between their forward and their backward.

    """
    samples = profile.batch / setting.num_micro_batches
    return tuple(
        stage.state.of_pipelines(setting.num_pipelines, activations=round(kept * stage.activation_bytes(samples)))
        for stage, kept in zip(profile.stages, stored, strict=True)
    )
