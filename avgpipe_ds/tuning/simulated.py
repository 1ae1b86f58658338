"""Prediction by simulation: the executor's own rules, fed with the times of the profile."""

from __future__ import annotations

from avgpipe_ds.schedules.costs import StageCosts
from avgpipe_ds.schedules.simulate import simulate
from avgpipe_ds.tuning.profile import Profile
from avgpipe_ds.tuning.setting import Setting

__all__ = ["SimulationPredictor"]

_ITERATIONS = 12


class SimulationPredictor:
    """Runs the setting in the simulator."""

    name = "simulation"

    def iteration_s(self, profile: Profile, setting: Setting) -> float:
        """Seconds of an iteration in steady state."""
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
        run = simulate(
            setting.plans(len(costs)),
            costs,
            num_pipelines=setting.num_pipelines,
            num_iterations=_ITERATIONS,
            shared_links=True,
            clipping=profile.clipping,
        )
        return run.seconds_per_iteration
