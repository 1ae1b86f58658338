"""What a profile says of a setting that was not tried: time by one of two predictors, memory by counting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from avgpipe_ds.memory.breakdown import Breakdown
from avgpipe_ds.schedules.plans import most_stored
from avgpipe_ds.tuning.profile import Profile
from avgpipe_ds.tuning.setting import Setting

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
        memory: of each stage.

    """

    setting: Setting
    iteration_s: float
    samples_per_s: float
    memory: tuple[Breakdown, ...]

    @property
    def peak_bytes(self) -> int:
        """Of the stage that needs most."""
        return max(stage.total for stage in self.memory)


def predict(profile: Profile, setting: Setting, predictor: Predictor) -> Prediction:
    """Time and memory of a setting."""
    iteration_s = predictor.iteration_s(profile, setting)
    return Prediction(
        setting=setting,
        iteration_s=iteration_s,
        samples_per_s=setting.num_pipelines * profile.batch / iteration_s,
        memory=predict_memory(profile, setting),
    )


def predict_memory(profile: Profile, setting: Setting) -> tuple[Breakdown, ...]:
    """Bytes of each stage (paper, section 5.2.2): N models with gradients and optimizer, a reference, N times what is stored."""
    number = setting.num_pipelines
    stored = most_stored(setting.plans(len(profile.stages)), number)
    samples = profile.batch / setting.num_micro_batches
    return tuple(
        Breakdown(
            weights=number * stage.weights + stage.frozen,
            gradients=number * stage.gradients,
            optimizer=number * stage.optimizer,
            reference=stage.reference if number > 1 else 0,
            activations=round(kept * stage.activation_bytes(samples)),
        )
        for stage, kept in zip(profile.stages, stored, strict=True)
    )
