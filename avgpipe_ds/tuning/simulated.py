"""Prediction by simulation: the executor's own rules, fed with the times of the profile."""

from __future__ import annotations

from functools import lru_cache

from avgpipe_ds.schedules.costs import StageCosts
from avgpipe_ds.schedules.simulate import Simulation, simulate
from avgpipe_ds.tuning.profile import Profile
from avgpipe_ds.tuning.setting import Setting

__all__ = ["SimulationPredictor", "simulated"]

_ITERATIONS = 12


class SimulationPredictor:
    """Runs the setting in the simulator."""

    name = "simulation"

    def iteration_s(self, profile: Profile, setting: Setting) -> float:
        """Seconds of an iteration in steady state."""
        return simulated(profile, setting).seconds_per_iteration


@lru_cache(maxsize=4)  # time and memory of a setting are asked for one after the other
def simulated(profile: Profile, setting: Setting) -> Simulation:
    """Some iterations of a setting, with the times that the profile says they have."""
    samples = profile.batch / setting.num_micro_batches
    scale = samples / profile.micro_batch
    costs = [
        StageCosts(
            forward_s=stage.forward_s(samples),
            backward_s=stage.backward_s(samples),
            activation_s=stage.activation.seconds(scale),
            gradient_s=stage.gradient.seconds(scale),
            step_s=stage.step_s,
        )
        for stage in profile.stages
    ]
    return simulate(
        setting.plans(len(costs)),
        costs,
        num_pipelines=setting.num_pipelines,
        num_iterations=_ITERATIONS,
        shared_links=True,
        clipping=profile.clipping,
    )
