"""The predictors by name."""

from __future__ import annotations

from avgpipe_ds.tuning.paper import PaperPredictor
from avgpipe_ds.tuning.prediction import Predictor
from avgpipe_ds.tuning.simulated import SimulationPredictor

__all__ = ["PREDICTORS", "predictor_named"]

PREDICTORS = ("simulation", "paper")


def predictor_named(name: str) -> Predictor:
    """The predictor of that name, one of `PREDICTORS`."""
    return PaperPredictor() if name == "paper" else SimulationPredictor()
