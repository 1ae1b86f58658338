"""One short profile of a running job (paper, section 5.2.1): some iterations as they are, then stages and links by themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from avgpipe_ds import deepspeed_compat as compat
from avgpipe_ds.errors import AvgPipeError
from avgpipe_ds.execution.pipeline import Pipeline
from avgpipe_ds.execution.stage import Stage
from avgpipe_ds.memory.model_state import ModelState
from avgpipe_ds.tuning.layer_probe import probe_layers
from avgpipe_ds.tuning.link_probe import probe_links
from avgpipe_ds.tuning.profile import Layer, Passes, Profile, StageProfile
from avgpipe_ds.tuning.stage_probe import Sample, StageProbe, probe_stage
from avgpipe_ds.tuning.training_times import TrainingTimes, training_times

__all__ = ["Profiler"]

_LARGER = 4
"""The largest micro-batch that is tried is this many times that of the training: enough to see whether time grows with size."""


class Profiler:
    """Watches the iterations between `begin` and `finish`, which train as usual.

    Args:
        stage: of this rank.
        pipelines: of this rank.
        has_momentum: whether the reference has one, which takes memory.

    """

    def __init__(self, stage: Stage, pipelines: Sequence[Pipeline], *, has_momentum: bool) -> None:
        self._stage = stage
        self._pipelines = pipelines
        self._has_momentum = has_momentum
        self._sample: Sample | None = None

    def begin(self) -> None:
        """Watch from now on, between two iterations.

        Raises:
            AvgPipeError: a timeline is being recorded.

        """
        if self._stage.recorder.recording:
            raise AvgPipeError("a timeline is being recorded (avgpipe.trace): profile before or after those iterations")
        self._stage.recorder.start()
        self._stage.capture = self._keep

    def finish(self) -> Profile:
        """Try stages and links, and gather what was found: the same on all ranks. Every rank calls it, between two iterations."""
        stage = self._stage
        spans = stage.recorder.stop()
        own, problem = None, None
        try:
            own = self._own(training_times(spans))
        except Exception as error:  # noqa: BLE001 - told to all ranks before any of them waits for a message
            problem = error
        stage.rendezvous.agree(("profiled",), stage.topology.world_ranks, problem)
        assert own is not None
        times, probe, layers = own
        activation, gradient = probe_links(stage, activation_bytes=probe.activation_bytes, gradient_bytes=probe.gradient_bytes)
        state = ModelState.of(self._pipelines[0].engine, has_momentum=self._has_momentum)
        mine = StageProfile(
            passes=probe.passes,
            activation=activation,
            gradient=gradient,
            step_s=times.step_s,
            overhead_s=times.overhead_s,
            utilisation=times.utilisation,
            layers=layers,
            weights=state.trained,
            frozen=state.frozen,
            gradients=state.gradients,
            optimizer=state.optimizer,
            reference=state.reference,
        )
        everybody = stage.rendezvous.gather(("profile",), stage.topology.world_ranks, (stage.topology.stage_id, mine))
        engine = self._pipelines[0].engine
        return Profile(
            num_pipelines=stage.num_pipelines,
            num_micro_batches=stage.num_micro_batches,
            batch=int(engine.train_micro_batch_size_per_gpu()) * stage.num_micro_batches,
            clipping=engine.gradient_clipping() > 0 or compat.has_own_collectives(engine),
            stages=_slowest_replicas(everybody, stage.topology.num_stages),
        )

    def abandon(self) -> None:
        """Watch no more."""
        self._stage.capture = None
        self._stage.recorder.stop()

    def _keep(self, inputs: Any, labels: Any) -> None:
        self._sample, self._stage.capture = Sample.of(inputs, labels), None

    def _own(self, times: TrainingTimes) -> tuple[TrainingTimes, StageProbe, tuple[Layer, ...]]:
        """What this stage finds out by itself."""
        assert self._sample is not None, "no forward was seen"
        pipeline = self._pipelines[0]
        samples = int(pipeline.engine.train_micro_batch_size_per_gpu())
        sizes = [samples]
        if self._sample.splits(samples) and not compat.needs_inputs_with_gradient(pipeline.engine):
            sizes = sorted({1, samples, min(_LARGER, self._stage.num_micro_batches) * samples})
        probe = probe_stage(pipeline, self._sample, samples=samples, sizes=sizes)
        if self._stage.device.type != "cuda":  # there spans are the times of launches
            probe = _calibrated(probe, samples, times)
        layers = probe_layers(pipeline, self._sample, stage_s=probe.seconds(samples)) if pipeline.module.forward_funcs else ()
        return times, probe, layers


def _slowest_replicas(everybody: Sequence[tuple[int, StageProfile]], num_stages: int) -> tuple[StageProfile, ...]:
    """Of each stage, that of the data-parallel replica which takes longest: the others wait for it."""

    def seconds(profile: StageProfile) -> float:
        largest = profile.passes[-1].samples
        return profile.forward_s(largest) + profile.backward_s(largest)

    return tuple(max((one for stage_id, one in everybody if stage_id == wanted), key=seconds) for wanted in range(num_stages))


def _calibrated(probe: StageProbe, samples: int, times: TrainingTimes) -> StageProbe:
    """The probe's times as they would be in training, where caches are cold and processes share cores."""
    same = next(one for one in probe.passes if one.samples == samples)
    forward, backward = times.forward_s / same.forward_s, times.backward_s / same.backward_s
    passes = tuple(
        Passes(
            samples=one.samples,
            forward_s=forward * one.forward_s,
            backward_s=backward * one.backward_s,
            activation_bytes=one.activation_bytes,
        )
        for one in probe.passes
    )
    return StageProbe(passes=passes, activation_bytes=probe.activation_bytes, gradient_bytes=probe.gradient_bytes)
