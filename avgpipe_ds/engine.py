"""What users hold: a DeepSpeed `PipelineEngine` that trains N elastic pipelines instead of one."""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from avgpipe_ds import checkpoint
from avgpipe_ds import deepspeed_compat as compat
from avgpipe_ds.averaging.reference import Reference, swapped
from avgpipe_ds.averaging.rules import make_rule
from avgpipe_ds.config import AvgPipeConfig
from avgpipe_ds.errors import AgreedError, AvgPipeError
from avgpipe_ds.evaluation import evaluate
from avgpipe_ds.execution.assembly import assemble_stage
from avgpipe_ds.execution.collective_call import TRAINING, CollectiveCall
from avgpipe_ds.execution.data_supply import DataSupply
from avgpipe_ds.execution.executor import Executor
from avgpipe_ds.execution.mailbox import Mailbox
from avgpipe_ds.execution.pipeline import Pipeline
from avgpipe_ds.memory.breakdown import Breakdown
from avgpipe_ds.memory.model_state import ModelState, measured_state
from avgpipe_ds.memory.report import MemoryReport, StageMemory
from avgpipe_ds.progress import Progress
from avgpipe_ds.schedules.deepspeed_schedules import PlannedSchedule, make_schedule
from avgpipe_ds.schedules.simulate import simulate
from avgpipe_ds.tracing.window import TraceWindow
from avgpipe_ds.tuning.adaptive_advance import AdaptiveAdvance
from avgpipe_ds.tuning.auto_pipelines import choose_pipelines
from avgpipe_ds.tuning.profile import Profile
from avgpipe_ds.tuning.profiler import Profiler
from avgpipe_ds.tuning.session import TuningSession

__all__ = ["AvgPipeEngine", "FurtherPipelines"]

_MEMORY_ITERATIONS = 3
"""In which activations are measured; the first ones fill the pipelines."""


class FurtherPipelines(Protocol):
    """Makes pipelines beside the first, from the weights that training began with."""

    def copies(self, number: int) -> list[Any]:
        """What `number` pipelines are built from; no communication."""

    def build(self, copies: list[Any]) -> list[compat.StageEngine]:
        """Their engines. Collective."""


class AvgPipeEngine(compat.StageEngine):
    """N pipelines over the same accelerators, pulled to a reference model (AvgPipe, PPoPP 2023, section 3).

    Made by `avgpipe_ds.initialize`. What differs from DeepSpeed's engine: `train_batch` trains one batch on each of N
    pipelines; evaluation, checkpoints and export use the reference model; batches may come in any shape. `module` and
    `optimizer` are those of pipeline 0, which is this engine. Every method that trains, evaluates, saves or loads is to be
    called by every rank.

    Attributes:
        pipelines: the N pipelines of this rank; each has `.module` and `.optimizer`.
        avgpipe_config: the "avgpipe" block.
        advance: how `"advance": "auto"` stands; without effect if the configuration gives a number.
        consumed_micro_batches: how many micro-batches of the data the training so far has used up.

    """

    pipelines: tuple[Pipeline, ...]
    avgpipe_config: AvgPipeConfig
    advance: AdaptiveAdvance
    consumed_micro_batches: int

    def start(self, config: AvgPipeConfig, others: list[compat.StageEngine]) -> None:
        """Connect the ranks and begin. Called once, by `initialize`, on every rank."""
        self.avgpipe_config = config
        self.consumed_micro_batches = 0
        self._progress = Progress()
        self._session: TuningSession | None = None
        self._further: FurtherPipelines | None = None
        self._connect(others)
        self.restart(iteration=0)

    def _connect(self, others: list[compat.StageEngine]) -> None:
        """Everything that depends on the number of pipelines. Collective."""
        config, engines = self.avgpipe_config, [self, *others]
        self._since_start = 0
        self._stage = assemble_stage(engines)
        self._together = CollectiveCall(self._stage.mailbox)
        self._data = DataSupply(self._stage)
        topology = self._stage.topology
        self.advance = AdaptiveAdvance(self._stage, self._memory_with, config.memory_limit_gb)
        schedule = self.advance.schedule if config.schedule.advance == "auto" else self._fixed_schedule()
        self.pipelines = tuple(Pipeline(i, engine, self._stage, schedule) for i, engine in enumerate(engines))
        self._reference = None
        if others:
            self._reference = Reference(make_rule(config.averaging, len(engines)), engines, self._stage.recorder)
        for pipeline in self.pipelines:
            pipeline.on_step = self._stepped
        self._trainable = self._now_trainable()
        self._executor = Executor(self._stage.mailbox, self._stage.recorder)
        self._trace = TraceWindow(
            None if config.num_pipelines == "auto" else config.trace,
            self._stage.recorder,
            rank=topology.rank,
            num_ranks=len(topology.world_ranks),
            stage_id=topology.stage_id,
            num_stages=topology.num_stages,
            replica_id=topology.replica_ranks.index(topology.rank),
            num_pipelines=len(engines),
            num_micro_batches=self._stage.num_micro_batches,
        )
        self._stage.activations.start()
        self._goodbye = partial(_close_at_exit, self._stage.mailbox, self._trace)  # not a method: it must not keep the engine
        atexit.register(self._goodbye)

    def tune(self, further: FurtherPipelines | None) -> None:
        """Profile the first iterations. Called once, by `initialize`, on every rank.

        Args:
            further: makes the pipelines beside the first, once it is known how many; None if a file is wanted, as `avgpipe-tune`
                does, which ends the training.

        """
        config, say = self.avgpipe_config, self.global_rank == 0
        conclude = self._end_with_profile if further is None else partial(choose_pipelines, config, say=say)
        self._further = further
        self._session = TuningSession(config.tuning.iterations, conclude)

    @property
    def num_pipelines(self) -> int:
        """N."""
        return len(self.pipelines)

    @property
    def iteration(self) -> int:
        """How many iterations have been trained."""
        return self._iteration

    def samples_per_iteration(self) -> int:
        """Samples that one `train_batch` trains on: N times DeepSpeed's `train_batch_size`."""
        return self.num_pipelines * int(self.train_batch_size())

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Train one batch on each of the N pipelines.

        The first and the last stage pull N * M micro-batches, pairs `(inputs, labels)`; pipeline i gets the i-th run of M. They
        may pull the data of the next iteration ahead; a new iterator takes over after it. When the call returns, the state on
        this rank is exactly that after one more iteration.

        Args:
            data_iter: needed on the first and the last stage, unless `initialize` got training data.

        Returns:
            Scalar: the mean of the losses of the N batches, over all data-parallel replicas, on every rank.

        Raises:
            DataExhausted: on every rank, when the data has ended exactly before this iteration.
            IncompleteIteration: on every rank, when it has ended within it.
            NonFiniteLoss, PeerLost, RemoteError: training can't go on.

        """
        if not torch.is_grad_enabled():
            raise RuntimeError("train_batch() needs gradients enabled; use eval_batch() to evaluate")
        with self._together(TRAINING):
            with self._trace.iteration(self._iteration):
                loss = self._train_iteration(data_iter)
            chosen = self._learn_from_iteration()
        if chosen is not None:
            self._go_on_with(chosen, keep_data=True)
        return loss

    def eval_batch(
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Evaluate the reference model; training work in flight is left as it is.

        Args:
            data_iter: needed on the first and the last stage; pairs `(inputs, labels)` of any size.
            return_logits: whether this rank wants the outputs; ranks may differ.
            compute_loss: whether to compute the loss; else the last stage returns the outputs, reduced as `reduce_output` says.
            reduce_output: "avg" for the mean over micro-batches, None for the list of the last stage.
            bcast_loss: whether ranks other than the last stage get the loss, too.
            num_micro_batches: how many to take; by default M.

        Returns:
            The mean loss over micro-batches and replicas; with `return_logits` a pair of it and the list of the outputs of all
            micro-batches.

        Raises:
            ValueError: on every rank, if the data ends early or the ranks disagree on `num_micro_batches`.

        """
        with self._together("eval_batch"), self.reference_weights():
            self.module.eval()
            try:
                return evaluate(
                    self,
                    self._stage,
                    data_iter,
                    num_micro_batches=self.micro_batches if num_micro_batches is None else num_micro_batches,
                    return_outputs=return_logits,
                    compute_loss=compute_loss,
                    reduce_output=reduce_output,
                    share_loss=bcast_loss,
                )
            finally:
                self.module.train()

    def meet(self, name: str) -> None:
        """Wait until all ranks have come here, before a collective of one's own. Every rank calls it.

        Args:
            name: of what is going to be done, for the error of ranks that do something else.

        Raises:
            ValueError: the ranks came with different names, or to different calls.
            AvgPipeError: the other ranks train.

        """
        with self._together(name):
            pass

    def profile(self, data_iter: Iterator[Any] | None = None, *, iterations: int = 20, keep: bool = True) -> Profile:
        """Train some iterations while measuring what tuning needs to know; every rank calls it (paper, section 5.2.1).

        Args:
            data_iter: as for `train_batch`.
            iterations: how many.
            keep: whether they count as training. Otherwise all of them train the data of one, and afterwards weights, optimizers,
                random numbers and the position in the data are as before; that takes a copy of the state in the host's memory.

        Returns:
            The same on all ranks; of data-parallel replicas that of the slowest.

        Raises:
            AvgPipeError: tuning or a timeline is under way.
            ValueError: `iterations` is below 1.
            Exception: as `train_batch`.

        """
        if iterations < 1:
            raise ValueError(f"a profile takes at least 1 iteration, got {iterations}")
        if self._session is not None or self._trace.pending:
            busy = "tuning" if self._session is not None else "a timeline (avgpipe.trace)"
            raise AvgPipeError(f"{busy} is under way and measures the same iterations: profile after it")
        profiler, saved = self._profiler(), None
        with self._together("profile"):
            if not keep:
                self._hold_data(data_iter)
                saved = checkpoint.snapshot(self)
            profiler.begin()
        try:
            for _ in range(iterations):
                self.train_batch(data_iter)
            with self._together("the end of profile"):
                return profiler.finish()
        finally:
            profiler.abandon()
            if saved is not None and self._together.usable:
                self._restore(saved)

    def memory_report(self) -> MemoryReport:
        """What training needs of every accelerator's memory, by kind; every rank calls it, after an iteration at least.

        Activations are those of the first iterations of this engine: counted by autograd's hooks on CPU, by the
        allocator on CUDA.

        Raises:
            AvgPipeError: on every rank, if one could not measure: nothing was trained yet, or the user's own hooks were in force.

        """
        stage = self._stage
        with self._together("memory_report"):
            unknown = stage.activations.micro_batch_bytes is None
            problem = AvgPipeError(f"memory_report(): {stage.activations.why_nothing}") if unknown else None
            stage.rendezvous.agree(("memory known",), stage.topology.world_ranks, problem)
            mine = StageMemory(
                rank=stage.topology.rank,
                stage_id=stage.topology.stage_id,
                measured=replace(
                    measured_state([pipeline.engine for pipeline in self.pipelines], self._reference),
                    activations=stage.activations.peak_bytes,
                ),
                predicted=self._memory_with(self._stored_together()),
            )
            return MemoryReport(stages=tuple(stage.rendezvous.gather(("memory",), stage.topology.world_ranks, mine)))

    def reference_state_dict(self) -> dict[str, Tensor]:
        """This stage's shard of the reference model: fp32 copies, names as in `module.state_dict()`.

        With bf16 or ZeRO-1 and several data-parallel replicas it gathers partitions: then all replicas call it.
        """
        with self.reference_weights():
            exact = {} if self._reference is None else self._reference.parameters()
            if self._reference is None:
                for group in compat.master_groups(self):
                    exact.update(zip(group.params, group.whole(group.masters), strict=True))
            by_name = dict(self.module.named_parameters(remove_duplicate=False))
            state = self.module.state_dict()
            state.pop(compat.PLACEHOLDER, None)
            for name, value in state.items():
                source = exact.get(by_name[name], value) if name in by_name else value
                state[name] = source.detach().to(torch.float32 if source.is_floating_point() else source.dtype, copy=True)
            return dict(state)

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save everything: in DeepSpeed's own layout the reference model, beside it what a run needs to continue bit for bit.

        Plain DeepSpeed can load the former. `client_state` comes back from `load_checkpoint`.
        """
        tag = f"global_step{self.global_steps}" if tag is None else str(tag)
        with self._together(f"save_checkpoint with tag {tag!r}"):
            checkpoint.save(self, save_dir, tag)
            with self.reference_weights(masters=True):
                return bool(
                    super().save_checkpoint(save_dir, tag, dict(client_state or {}), save_latest, exclude_frozen_parameters)
                )

    def load_checkpoint(self, load_dir: str, tag: str | None = None, **options: Any) -> tuple[str | None, dict[str, Any] | None]:
        """Continue from a checkpoint; what is in flight, and data that was taken ahead, is given up.

        The data is to be positioned after `consumed_micro_batches` micro-batches. A checkpoint of plain DeepSpeed starts all
        pipelines from its weights.

        Args:
            load_dir: as given to `save_checkpoint`.
            tag: by default the latest.
            options: those of `deepspeed.PipelineEngine.load_checkpoint`; with `load_module_only=True` only the reference's
                weights are taken.

        Raises:
            ValueError: on every rank, the checkpoint was saved with another number of pipelines, stages or replicas, or another
                averaging rule. Nothing has changed then.

        """
        weights_only = bool(options.get("load_module_only"))
        if self._further is not None and not weights_only:
            self._adopt(load_dir, tag)
        with self._together(f"load_checkpoint with tag {tag!r} and load_module_only={weights_only}"):
            state = checkpoint.read(self, load_dir, tag, weights_only=weights_only)
            wanted = {name: options.get(name, True) for name in ("load_optimizer_states", "load_lr_scheduler_states")}
            if state is not None:  # it has them all, and DeepSpeed 0.19.8 can't load its own under bf16 without ZeRO
                options |= dict.fromkeys(wanted, False)
            path, client_state, problem = None, None, None
            try:
                path, client_state = super().load_checkpoint(load_dir, tag, **options)
            except Exception as error:  # noqa: BLE001 - one stage's files may be bad, the others' good
                problem = error
            self._stage.rendezvous.agree(("loaded",), self._stage.topology.world_ranks, problem)
            if path is None:
                return path, client_state
            if state is None:
                checkpoint.start_from_first(self, weights_only=weights_only)
            else:
                checkpoint.restore(self, state, **wanted)
                client_state = {k: v for k, v in (client_state or {}).items() if k not in ("optimizer", "lr_scheduler")}
            return path, client_state

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Refused: work of the next iteration may be under way at the present size."""
        raise AvgPipeError(
            f"the batch size is fixed while training: set train_batch_size to {train_batch_size} in the configuration"
        )

    def close(self, reason: str = "it ended") -> None:
        """Say goodbye to the other ranks and release threads and connections.

        The others may still finish what this rank has already done for them. Runs by itself at exit.
        """
        self._trace.close()
        self._stage.mailbox.close(reason)
        atexit.unregister(self._goodbye)
        self._together.stop(AvgPipeError("it was closed"))
        self._executor.clear()
        for pipeline in self.pipelines:  # graphs in flight refer back to this engine where Python's collector can't look
            pipeline.give_up()

    @property
    def reference(self) -> Reference | None:
        """This stage's shard of the reference model; None with one pipeline, which then is the model."""
        return self._reference

    def restart(self, iteration: int) -> None:
        """Give up what is in flight and continue from the present weights with `iteration`.

        Every rank does so at the same point.
        """
        self._iteration = iteration
        self._stage.training = iteration - 1
        self._stage.mailbox.forget()
        self._stage.feed.reset()
        self._executor.clear()
        self.advance.restart()
        for pipeline in self.pipelines:
            pipeline.restart(iteration)
            self._executor.add(pipeline.stream())

    @contextmanager
    def reference_weights(self, *, masters: bool = False) -> Iterator[None]:
        """Inside the block, `module` holds the reference model; nothing is copied in fp32.

        Args:
            masters: whether the optimizer's master weights are the reference's, too.

        """
        self._check_trainable()
        starts = [pipeline.start_of_iteration[1] for pipeline in self.pipelines]
        means = [_mean_or_first(values) for values in zip(*starts, strict=True)]
        values = dict(zip(self.module.buffers(), means, strict=True))
        if self._reference is not None:
            values |= self._reference.parameters()
            if masters:
                values |= self._reference.masters()
        with swapped(values) if values else nullcontext():
            yield

    def _profiler(self) -> Profiler:
        return Profiler(self._stage, self.pipelines, self.avgpipe_config.averaging)

    def _restore(self, saved: dict[str, Any]) -> None:
        """As before a profile that was not to be kept."""
        with self._together("the restoration after profile"):
            held = self._stage.feed.let_go()
            checkpoint.restore(self, saved, load_optimizer_states=True, load_lr_scheduler_states=True)
            self._stage.feed.give_back(self._iteration, held)

    def _end_with_profile(self, profile: Profile) -> NoReturn:
        """What `avgpipe-tune` asks for: write the profile, and end the script on every rank.

        Raises:
            SystemExit: with status 0.

        """
        file, problem, topology = self.avgpipe_config.tuning.profile, None, self._stage.topology
        assert file is not None
        try:
            if topology.rank == topology.world_ranks[0]:
                profile.save(Path(file))
        except OSError as error:
            problem = error
        self._stage.rendezvous.agree(("profile written",), topology.world_ranks, problem)
        self.close("it was profiled")
        raise SystemExit(0)

    def _hold_data(self, data_iter: Iterator[Any] | None) -> None:
        if self._stage.topology.takes_data:
            if data_iter is not None:
                self.set_dataiterator(data_iter)
            self._data.take(self._iteration, self.data_iterator)
            self._stage.feed.hold(self._iteration)

    def _fixed_schedule(self) -> Callable[[int], PlannedSchedule]:
        topology = self._stage.topology
        schedule = make_schedule(
            self.avgpipe_config.schedule,
            num_micro_batches=self.micro_batches,
            num_stages=topology.num_stages,
            stage_id=topology.stage_id,
        )
        return lambda iteration: schedule

    def _stored_together(self) -> int:
        """Micro-batches that all pipelines together store on this stage, if the present schedule runs as in the simulator."""
        plans = self.pipelines[0].schedule(self._iteration).plans
        return simulate(plans, num_pipelines=self.num_pipelines).peak_together[self._stage.topology.stage_id]

    def _memory_with(self, stored: int) -> Breakdown:
        """Bytes of this stage with `stored` micro-batches, of all pipelines, between their forward and their backward."""
        has_momentum = self._reference is not None and self._reference.rule.has_momentum
        state = ModelState.of(self, has_momentum=has_momentum).of_pipelines(self.num_pipelines)
        return replace(state, activations=stored * (self._stage.activations.micro_batch_bytes or 0))

    def _train_iteration(self, data_iter: Iterator[Any] | None) -> Tensor:
        stage, iteration = self._stage, self._iteration
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        self._data.take(iteration, self.data_iterator)
        self._check_trainable()
        self._follow_first_optimizer()
        for pipeline in self.pipelines:
            pipeline.module.train()
        stage.begin(iteration)
        if self._session is not None and self._session.ends_with_next:
            stage.last = iteration
        begin = time.perf_counter()
        self._executor.run(lambda: self._nothing_left(iteration))
        self._seconds = time.perf_counter() - begin
        if not stage.iteration_complete:
            stage.end_without_data()
            raise AgreedError(self._data.end(iteration))
        self._iteration += 1
        self.consumed_micro_batches += stage.num_pipelines * stage.num_micro_batches
        if stage.topology.takes_data:
            stage.feed.finish(iteration)
            stage.feed.ready(iteration + 1)  # on both stages at the same point, however far each has run ahead
        return self._progress.report(self, self.pipelines, self._iteration)

    def _learn_from_iteration(self) -> AvgPipeConfig | None:
        """What an iteration tells of memory, of the advance, and of N: then the configuration to go on with.

        Raises:
            Exception: tuning failed; it is the same on all ranks, and the engine has stopped.

        """
        self._since_start += 1
        if self._since_start == _MEMORY_ITERATIONS:
            self._stage.activations.stop()
        if self._session is not None:
            try:
                return self._session.trained(self._profiler)
            except AgreedError as error:
                raise error.error from error
        if self.avgpipe_config.schedule.advance == "auto":
            self.advance.trained(self._iteration - 1, self._seconds)
        return None

    def _go_on_with(self, config: AvgPipeConfig, *, keep_data: bool) -> None:
        """Train as many pipelines as `config` says from here on, all from the present state; what is under way is given up.

        With `keep_data` nothing is under way, and data that was taken ahead is trained next.

        Raises:
            Exception: on every rank, if one of them can't copy its stage.

        """
        first, old, further = self.pipelines[0], self._stage, self._further
        assert further is not None
        self._session, self._further, old.last = None, None, None
        with self._together("the change of num_pipelines"):
            copies, problem = [], None
            try:
                self._check_still_trainable()
                copies = further.copies(config.first_num_pipelines - 1)
            except Exception as error:  # noqa: BLE001 - told to all ranks, before any of them waits for the others inside DeepSpeed
                problem = error
            old.rendezvous.agree(("reconnect",), old.topology.world_ranks, problem)
            others = further.build(copies)
            random = first.random.state_dict()
            self._executor.clear()
            old.rendezvous.gather(("reconnected",), old.topology.world_ranks)  # nobody needs an answer of this rank any more
            old.mailbox.close("it reconnects")
            atexit.unregister(self._goodbye)
            self.avgpipe_config = config
            self._connect(others)
            self.pipelines[0].random.load_state_dict(random)
            checkpoint.start_from_first(self, weights_only=False)
            if keep_data:
                self._stage.feed.inherit(old.feed, self._iteration)

    def _adopt(self, load_dir: str, tag: str | None) -> None:
        """Where N is still to be found out, that of a checkpoint of several pipelines is taken."""
        with self._together("load_checkpoint while num_pipelines is being tuned"):
            state = checkpoint.read(self, load_dir, tag, weights_only=False, any_number=True)
        number = 1 if state is None else state["shape"]["num_pipelines"]
        if number > 1:
            self._go_on_with(self.avgpipe_config.with_pipelines(number), keep_data=False)

    def _check_still_trainable(self) -> None:
        """Further pipelines are copied from what the first was at the start.

        Raises:
            AvgPipeError: `requires_grad` was changed since then.

        """
        if self._now_trainable() != self._trainable:
            raise AvgPipeError('parameters were frozen or unfrozen while "num_pipelines": "auto" was found out: give a number')

    def _stepped(self, pipeline: Pipeline) -> None:
        if self._reference is not None:
            self._reference.stepped(pipeline.pipeline_id)

    def _follow_first_optimizer(self) -> None:
        """A learning rate that the user changed on `optimizer`, which is pipeline 0's, holds for all pipelines."""
        for pipeline in self.pipelines[1:]:
            for mine, first in zip(pipeline.engine.basic_optimizer.param_groups, self.basic_optimizer.param_groups, strict=True):
                for key, value in first.items():
                    if key != "params":  # a tensor stays this pipeline's own: its scheduler writes into it
                        mine[key] = value.clone() if isinstance(value, Tensor) else value

    def _nothing_left(self, iteration: int) -> bool:
        """Whether `train_batch` can return: all pipelines have stepped, or the data has ended before they could."""
        self._together.expect_training()
        return self._stage.iteration_complete or self._data.ended(iteration)

    def _now_trainable(self) -> list[list[bool]]:
        return [[p.requires_grad for p in pipeline.module.parameters()] for pipeline in self.pipelines]

    def _check_trainable(self) -> None:
        """With several pipelines, which parameters train is settled: the reference is laid out for them, the rest is shared.

        Raises:
            AvgPipeError: `requires_grad` was changed since `initialize`.

        """
        if self._reference is not None and self._now_trainable() != self._trainable:
            raise AvgPipeError(
                "parameters were frozen or unfrozen after initialize, which several pipelines can't follow: "
                "save a checkpoint before, build the engine anew and load it with load_module_only=True"
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
