"""The N pipelines of one rank and what they share, connected to the other ranks."""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from avgpipe_ds import deepspeed_compat as compat
from avgpipe_ds.averaging.reference import Reference, swapped
from avgpipe_ds.averaging.rules import make_rule
from avgpipe_ds.config import AvgPipeConfig
from avgpipe_ds.errors import AgreedError, AvgPipeError
from avgpipe_ds.execution.assembly import assemble_stage
from avgpipe_ds.execution.collective_call import CollectiveCall
from avgpipe_ds.execution.data_supply import DataSupply
from avgpipe_ds.execution.executor import Executor
from avgpipe_ds.execution.mailbox import Mailbox
from avgpipe_ds.execution.pipeline import Pipeline
from avgpipe_ds.execution.stage import Stage
from avgpipe_ds.memory.breakdown import Breakdown
from avgpipe_ds.memory.engine_state import measured_state, state_of_one
from avgpipe_ds.memory.report import StageMemory
from avgpipe_ds.schedules.deepspeed_schedules import PlannedSchedule, make_schedule
from avgpipe_ds.schedules.simulate import simulate
from avgpipe_ds.tracing.window import TraceWindow
from avgpipe_ds.tuning.adaptive_advance import AdaptiveAdvance

__all__ = ["Ensemble"]

_MEMORY_ITERATIONS = 3
"""In which activations are measured; the first ones fill the pipelines."""


class Ensemble:
    """N elastic pipelines (paper, section 3) on stage k. Where N changes, a new one takes over.

    Making one is collective over all ranks, and so are its methods where they say so.

    Args:
        config: the "avgpipe" block.
        engines: of its pipelines, with equal weights; pipeline 0's is the one that users hold.
        run: a name that all ranks share, for timelines.

    Attributes:
        stage: this rank's place, and what its pipelines share.
        pipelines: pipeline 0 .. N-1.
        reference: this stage's shard of the reference model; None with one pipeline, which then is the model.
        together: the block for what all ranks do together.
        advance: how `"advance": "auto"` stands; without effect if the configuration gives a number.
        trace: the timeline that was asked for.

    """

    def __init__(self, config: AvgPipeConfig, engines: Sequence[compat.StageEngine], *, run: str) -> None:
        self.stage = stage = assemble_stage(engines)
        self.together = CollectiveCall(stage.mailbox)
        self.advance = AdaptiveAdvance(stage, self.memory_with, config.memory_limit_gb)
        schedule = self.advance.schedule if config.schedule.advance == "auto" else _fixed_schedule(config, engines[0], stage)
        self.pipelines = tuple(Pipeline(i, engine, stage, schedule) for i, engine in enumerate(engines))
        self.reference: Reference | None = None
        if len(engines) > 1:
            self.reference = Reference(make_rule(config.averaging, len(engines)), engines, stage.recorder)
        for pipeline in self.pipelines:
            pipeline.on_step = self._stepped
        self.trace = _trace(config, stage, run)
        self._data = DataSupply(stage)
        self._executor = Executor(stage.mailbox, stage.recorder)
        self._trainable = self._now_trainable()
        self._trained = 0
        stage.activations.start()
        self._goodbye = partial(_close_at_exit, stage.mailbox, self.trace)  # not a method: it must not keep the engines
        atexit.register(self._goodbye)

    def restart(self, iteration: int) -> None:
        """Give up what is in flight and continue from the present weights with `iteration`. Every rank does so."""
        stage = self.stage
        stage.training = iteration - 1
        stage.mailbox.forget()
        stage.feed.reset()
        self._executor.clear()
        self.advance.restart()
        for pipeline in self.pipelines:
            pipeline.restart(iteration)
            self._executor.add(pipeline.stream())

    def train(self, iteration: int, data_iter: Iterator[Any] | None) -> float:
        """Train one batch on each pipeline. Every rank calls it.

        Args:
            iteration: the one after that of the last call.
            data_iter: needed on the first and the last stage.

        Returns:
            How long it took this rank, in seconds, its data not counted.

        Raises:
            AgreedError: the data has ended; the iteration can be tried again with other data.
            Exception: as `AvgPipeEngine.train_batch`.

        """
        stage = self.stage
        self._data.take(iteration, data_iter)
        self.check_trainable()
        self._follow_first_optimizer()
        for pipeline in self.pipelines:
            pipeline.module.train()
        stage.begin(iteration)
        begin = time.perf_counter()
        self._executor.run(lambda: self._nothing_left(iteration))
        seconds = time.perf_counter() - begin
        if not stage.iteration_complete:
            stage.end_without_data()
            raise AgreedError(self._data.end(iteration))
        if stage.topology.takes_data:
            stage.feed.finish(iteration)
            stage.feed.ready(iteration + 1)  # on both stages at the same point, however far each has run ahead
        self._trained += 1
        if self._trained == _MEMORY_ITERATIONS:
            stage.activations.stop()
        return seconds

    def hold_data(self, iteration: int, data_iter: Iterator[Any] | None) -> None:
        """Take the data of an iteration that has not begun, for every further one, until the feed lets go."""
        if self.stage.topology.takes_data:
            self._data.take(iteration, data_iter)
            self.stage.feed.hold(iteration)

    def reference_weights(self, *, masters: bool = False) -> AbstractContextManager[None]:
        """Inside the block, the module of pipeline 0 holds the reference model; nothing is copied in fp32.

        With bf16 or ZeRO-1 and several data-parallel replicas it gathers partitions: then all replicas call it.

        Args:
            masters: whether the optimizer's master weights are the reference's, too.

        """
        self.check_trainable()
        starts = [pipeline.start_of_iteration[1] for pipeline in self.pipelines]
        means = [_mean_or_first(values) for values in zip(*starts, strict=True)]
        values = dict(zip(self.pipelines[0].module.buffers(), means, strict=True))
        if self.reference is not None:
            values |= self.reference.parameters()
            if masters:
                values |= self.reference.masters()
        return swapped(values) if values else nullcontext()

    def memory(self, iteration: int) -> StageMemory:
        """Of this rank's accelerator, measured and predicted.

        Args:
            iteration: whose schedule the prediction is for.

        """
        topology, activations = self.stage.topology, self.stage.activations
        engines = [pipeline.engine for pipeline in self.pipelines]
        plans = self.pipelines[0].schedule(iteration).plans
        stored = simulate(plans, num_pipelines=len(engines)).peak_together[topology.stage_id]
        return StageMemory(
            rank=topology.rank,
            stage_id=topology.stage_id,
            measured=replace(measured_state(engines, self.reference), activations=activations.peak_bytes),
            predicted=self.memory_with(stored),
        )

    def memory_with(self, stored: int) -> Breakdown:
        """Bytes of this stage with `stored` micro-batches, of all pipelines, between their forward and their backward."""
        has_momentum = self.reference is not None and self.reference.rule.has_momentum
        state = state_of_one(self.pipelines[0].engine, has_momentum=has_momentum)
        activations = stored * (self.stage.activations.micro_batch_bytes or 0)
        return state.of_pipelines(len(self.pipelines), activations=activations)

    @property
    def trainable_changed(self) -> bool:
        """Whether `requires_grad` of a parameter is not what it was at the start."""
        return self._now_trainable() != self._trainable

    def check_trainable(self) -> None:
        """With several pipelines, which parameters train is settled: the reference is laid out for them, the rest is shared.

        Raises:
            AvgPipeError: `requires_grad` was changed since `initialize`.

        """
        if self.reference is not None and self.trainable_changed:
            raise AvgPipeError(
                "parameters were frozen or unfrozen after initialize, which several pipelines can't follow: "
                "save a checkpoint before, build the engine anew and load it with load_module_only=True"
            )

    def disconnect(self) -> None:
        """Leave the pipelines' weights to another ensemble. Every rank calls it; nobody may need this one's answers any more."""
        self._executor.clear()
        self.stage.mailbox.close("it reconnects")
        atexit.unregister(self._goodbye)

    def close(self, reason: str) -> None:
        """Say goodbye to the other ranks, which may still finish what this one has done for them; release what is held."""
        self.trace.close()
        self.stage.mailbox.close(reason)
        atexit.unregister(self._goodbye)
        self.together.stop(AvgPipeError("it was closed"))
        self._executor.clear()
        for pipeline in self.pipelines:  # graphs in flight refer back to the engine where Python's collector can't look
            pipeline.give_up()

    def _stepped(self, pipeline: Pipeline) -> None:
        if self.reference is not None:
            self.reference.stepped(pipeline.pipeline_id)

    def _nothing_left(self, iteration: int) -> bool:
        """Whether `train` can return: all pipelines have stepped, or the data has ended before they could."""
        self.together.expect_training()
        return self.stage.iteration_complete or self._data.ended(iteration)

    def _follow_first_optimizer(self) -> None:
        """A learning rate that the user changed on `optimizer`, which is pipeline 0's, holds for all pipelines."""
        groups = self.pipelines[0].engine.basic_optimizer.param_groups
        for pipeline in self.pipelines[1:]:
            for mine, first in zip(pipeline.engine.basic_optimizer.param_groups, groups, strict=True):
                for key, value in first.items():
                    if key != "params":  # a tensor stays this pipeline's own: its scheduler writes into it
                        mine[key] = value.clone() if isinstance(value, Tensor) else value

    def _now_trainable(self) -> list[list[bool]]:
        return [[p.requires_grad for p in pipeline.module.parameters()] for pipeline in self.pipelines]


def _fixed_schedule(config: AvgPipeConfig, engine: compat.StageEngine, stage: Stage) -> Callable[[int], PlannedSchedule]:
    schedule = make_schedule(
        config.schedule,
        num_micro_batches=engine.micro_batches,
        num_stages=stage.topology.num_stages,
        stage_id=stage.topology.stage_id,
    )
    return lambda iteration: schedule


def _trace(config: AvgPipeConfig, stage: Stage, run: str) -> TraceWindow:
    topology = stage.topology
    return TraceWindow(
        None if config.num_pipelines == "auto" else config.trace,  # a timeline is wanted of what goes on
        stage.recorder,
        run=run,
        rank=topology.rank,
        num_ranks=len(topology.world_ranks),
        stage_id=topology.stage_id,
        num_stages=topology.num_stages,
        replica_id=topology.replica_ranks.index(topology.rank),
        num_pipelines=stage.num_pipelines,
        num_micro_batches=stage.num_micro_batches,
    )


def _mean_or_first(values: tuple[Tensor, ...]) -> Tensor:
    """Buffers of N pipelines as one: running statistics are averaged, counters are those of pipeline 0."""
    first = values[0]
    return torch.stack(values).mean(0) if len(values) > 1 and first.is_floating_point() else first


def _close_at_exit(mailbox: Mailbox, trace: TraceWindow) -> None:
    """Say goodbye when the interpreter ends, before torch and DeepSpeed tear down what the goodbye needs."""
    trace.close()
    error = getattr(sys, "last_value", None)
    mailbox.close("it ended" if error is None else f"it ended with {type(error).__name__}: {error}")
