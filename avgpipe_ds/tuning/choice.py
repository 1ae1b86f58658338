"""From predictions to a choice: the fastest setting that fits."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from avgpipe_ds.errors import AvgPipeError
from avgpipe_ds.tuning.prediction import Prediction, Predictor, predict
from avgpipe_ds.tuning.profile import Profile
from avgpipe_ds.tuning.setting import Setting

__all__ = ["Candidate", "best", "rank"]

_AS_FAST = 0.01
_GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A setting with what is expected of it.

    Attributes:
        prediction: time and memory.
        out: why it can't be chosen; empty if it can.

    """

    prediction: Prediction
    out: str = ""


def rank(
    profile: Profile, settings: Iterable[Setting], predictor: Predictor, *, memory_limit_gb: float | None = None
) -> list[Candidate]:
    """All settings, the best first and those that do not fit last.

    Args:
        profile: what is known.
        settings: to be compared.
        predictor: of their times.
        memory_limit_gb: of every accelerator; None for no limit.

    """
    found = []
    for setting in settings:
        prediction = predict(profile, setting, predictor)
        found.append(Candidate(prediction=prediction, out=_too_large(prediction, memory_limit_gb)))
    return sorted(found, key=lambda one: (bool(one.out), -one.prediction.samples_per_s, one.prediction.setting))


def best(candidates: list[Candidate]) -> Prediction:
    """The setting to train with: of those within 1 % of the fastest the one that needs least memory.

    Raises:
        AvgPipeError: none fits; it says which needs least, and what limit that takes.

    """
    fitting = [one.prediction for one in candidates if not one.out]
    if not fitting:
        smallest = min((one.prediction for one in candidates), key=lambda one: one.peak_bytes)
        raise AvgPipeError(
            f"no setting fits into the memory limit: {smallest.setting} needs least, {_rounded_up(smallest.peak_bytes)} GB on its"
            " fullest stage. Raise avgpipe.memory_limit_gb to that, use more stages, or recompute activations."
        )
    fastest = max(one.samples_per_s for one in fitting)
    as_fast = [one for one in fitting if one.samples_per_s >= (1 - _AS_FAST) * fastest]
    return min(as_fast, key=lambda one: (one.peak_bytes, -one.samples_per_s, one.setting))


def _too_large(prediction: Prediction, memory_limit_gb: float | None) -> str:
    if memory_limit_gb is None or prediction.peak_bytes <= memory_limit_gb * _GB:
        return ""
    stage_id = max(range(len(prediction.bound)), key=lambda k: prediction.bound[k].total)
    return f"stage {stage_id} may need {_rounded_up(prediction.peak_bytes)} GB, the limit is {memory_limit_gb:.3g} GB"


def _rounded_up(size: int) -> str:
    """Bytes in GB with three digits, never too little: it is what a user will set as the limit."""
    digits = 2 - math.floor(math.log10(max(1, size)))
    return f"{math.ceil(size * 10.0**digits) / 10.0**digits / _GB:.3g}"
