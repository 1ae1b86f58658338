"""One short profile of a running job (paper, section 5.2.1): some iterations as they are, then stages and links by themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from avgpipe_ds import deepspeed_compat as compat
from avgpipe_ds.averaging.rules import make_rule
from avgpipe_ds.config import AveragingConfig
from avgpipe_ds.execution.pipeline import Pipeline
from avgpipe_ds.execution.stage import Stage
from avgpipe_ds.memory.engine_state import state_of_one
from avgpipe_ds.tuning.averaging_probe import averaging_s
from avgpipe_ds.tuning.layer_probe import probe_layers
from avgpipe_ds.tuning.link_probe import probe_links
from avgpipe_ds.tuning.profile import Layer, Passes, Profile, StageProfile
from avgpipe_ds.tuning.sample import Sample
from avgpipe_ds.tuning.stage_probe import StageProbe, probe_stage, sent_bytes
from avgpipe_ds.tuning.training_times import TrainingTimes, training_times

__all__ = ["Profiler"]

_LARGER = 4
"""The largest micro-batch that is tried is this many times that of the training: enough to see whether time grows with size."""


class Profiler:
    """Watches the iterations between `begin` and `finish`, which train as usual.

    Args:
        stage: of this rank.
        pipelines: of this rank.
        averaging: the rule that several pipelines have, or would have.

    """

    def __init__(self, stage: Stage, pipelines: Sequence[Pipeline], averaging: AveragingConfig) -> None:
        self._stage = stage
        self._pipelines = pipelines
        self._averaging = averaging
        self._sample: Sample | None = None

    def begin(self) -> None:
        """Watch from now on, between two iterations; no timeline may be recorded meanwhile."""
        assert not self._stage.recorder.recording
        self._stage.recorder.start()
        self._stage.capture = self._keep

    def abandon(self) -> None:
        """Watch no more."""
        self._stage.capture = None
        self._stage.recorder.stop()

    def finish(self) -> Profile:
        """Try stages and links, and gather what was found: the same on all ranks. Every rank calls it, between two iterations.

        Raises:
            AgreedError: a rank could not find out what it has to.

        """
        stage, engine = self._stage, self._pipelines[0].engine
        spans = stage.recorder.stop()
        mine, problem = None, None
        try:
            mine = self._alone(training_times(spans))
        except Exception as error:  # noqa: BLE001 - told to all ranks before any of them waits for a message
            problem = error
        stage.rendezvous.agree(("profiled",), stage.topology.world_ranks, problem)
        assert mine is not None
        own, sizes = mine
        activation, gradient = probe_links(stage, activation_bytes=sizes[0], gradient_bytes=sizes[1])
        own = own.model_copy(update={"activation": activation, "gradient": gradient})
        everybody = stage.rendezvous.gather(("profile",), stage.topology.world_ranks, (stage.topology.stage_id, own))
        return Profile(
            num_pipelines=stage.num_pipelines,
            num_micro_batches=stage.num_micro_batches,
            batch=int(engine.train_micro_batch_size_per_gpu()) * stage.num_micro_batches,
            num_replicas=len(stage.topology.world_ranks) // stage.topology.num_stages,
            clipping=engine.gradient_clipping() > 0 or compat.has_own_collectives(engine),
            stages=_slowest_replicas(everybody, stage.topology.num_stages),
        )

    def _keep(self, inputs: Any, labels: Any) -> None:
        self._sample, self._stage.capture = Sample.of(inputs, labels), None

    def _alone(self, times: TrainingTimes) -> tuple[StageProfile, tuple[int, int]]:
        """What this stage finds out by itself, and the sizes of its messages to the next and the previous one."""
        assert self._sample is not None, "no forward was seen"
        first, rule = self._pipelines[0], make_rule(self._averaging, max(2, len(self._pipelines)))
        samples = int(first.engine.train_micro_batch_size_per_gpu())
        layers: tuple[Layer, ...] = ()
        if compat.recomputes_activations(first.module):  # its graph can't be differentiated but in training
            own = Passes(
                samples=samples,
                forward_s=times.forward_s,
                backward_s=times.backward_s,
                activation_bytes=self._stage.activations.micro_batch_bytes or 0,
            )
            probe = StageProbe(passes=(own,), sent_bytes=sent_bytes(first, self._sample))
        else:
            larger = min(_LARGER, max(2, self._stage.num_micro_batches)) * samples
            sizes = (1, larger) if self._sample.splits(samples) else ()
            probe = probe_stage(first, self._sample, samples=samples, sizes=sizes)
            if self._stage.device.type != "cuda":  # there spans are the times of launches
                probe = _calibrated(probe, samples, times)
            trained = probe.at(samples)
            layers = probe_layers(first, self._sample, stage_s=trained.forward_s + trained.backward_s)
        # With several pipelines the steps of the training have it already.
        extra_s = 0.0 if len(self._pipelines) > 1 else averaging_s(rule, compat.masters_of(first.engine), self._stage.device)
        profile = StageProfile(
            passes=probe.passes,
            step_s=times.step_s,
            averaging_s=extra_s,
            overhead_s=times.overhead_s,
            utilisation=times.utilisation,
            layers=layers,
            state=state_of_one(first.engine, has_momentum=rule.has_momentum),
        )
        return profile, (probe.sent_bytes, self._sample.gradient_bytes)


def _slowest_replicas(everybody: Sequence[tuple[int, StageProfile]], num_stages: int) -> tuple[StageProfile, ...]:
    """Of each stage, that of the data-parallel replica which takes longest: the others wait for it."""

    def seconds(profile: StageProfile) -> float:
        largest = profile.passes[-1].samples
        return profile.forward_s(largest) + profile.backward_s(largest)

    return tuple(max((one for stage_id, one in everybody if stage_id == wanted), key=seconds) for wanted in range(num_stages))


def _calibrated(probe: StageProbe, samples: int, times: TrainingTimes) -> StageProbe:
    """The probe's times as they would be in training, where caches are cold and processes share cores."""
    same = probe.at(samples)
    forward, backward = times.forward_s / same.forward_s, times.backward_s / same.backward_s
    scaled = (
        one.model_copy(update={"forward_s": forward * one.forward_s, "backward_s": backward * one.backward_s})
        for one in probe.passes
    )
    return StageProbe(passes=tuple(scaled), sent_bytes=probe.sent_bytes)
