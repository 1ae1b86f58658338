"""Prediction by simulation: the executor's own rules, fed with the times of the profile."""

from __future__ import annotations

from functools import lru_cache
from statistics import fmean

from avgpipe_ds.schedules.costs import StageCosts
from avgpipe_ds.schedules.simulate import simulate
from avgpipe_ds.tuning.profile import Profile
from avgpipe_ds.tuning.setting import Setting

__all__ = ["SimulationPredictor", "simulated"]

_FEWEST_ITERATIONS, _MOST_ITERATIONS = 4, 12
_MICRO_BATCHES = 256
"""Enough of them for a steady state; long batches need fewer iterations for that."""
_VARIATION, _DRAWS = 0.03, 2
"""Of several pipelines: computations vary by this part of their time, as they do in training; and how many times it is drawn."""


class SimulationPredictor:
    """Runs the setting in the simulator."""

    name = "simulation"

    def iteration_s(self, profile: Profile, setting: Setting) -> float:
        """Seconds of an iteration in steady state."""
        return simulated(profile, setting)[0]


@lru_cache(maxsize=1024)  # time and memory of a setting are asked for one after the other
def simulated(profile: Profile, setting: Setting) -> tuple[float, tuple[int, ...]]:
    """Seconds of an iteration with the profile's times, and by stage the most micro-batches that all pipelines together store."""
    samples = profile.batch / setting.num_micro_batches
    scale = samples / profile.micro_batch
    costs = [
        StageCosts(
            forward_s=stage.forward_s(samples),
            backward_s=stage.backward_s(samples),
            activation_s=stage.activation.seconds(scale),
            gradient_s=stage.gradient.seconds(scale),
            step_s=stage.step_s + (stage.averaging_s if setting.num_pipelines > 1 else 0.0),
        )
        for stage in profile.stages
    ]
    iterations = min(_MOST_ITERATIONS, max(_FEWEST_ITERATIONS, _MICRO_BATCHES // setting.num_micro_batches))
    # Alone, nothing depends on who comes first. Otherwise each run has its mirror image: what is drawn adds nothing to the work
    # of both together.
    draws = (
        [(0, 0.0)] if setting.num_pipelines == 1 else [(seed, sign * _VARIATION) for seed in range(_DRAWS) for sign in (1, -1)]
    )
    runs = [
        simulate(
            setting.plans(len(costs)),
            costs,
            num_pipelines=setting.num_pipelines,
            num_iterations=iterations,
            shared_links=True,
            clipping=profile.clipping,
            variation=variation,
            seed=seed,
        )
        for seed, variation in draws
    ]
    peaks = zip(*(run.peak_together for run in runs), strict=True)
    return fmean(run.seconds_per_iteration for run in runs), tuple(max(peak) for peak in peaks)
