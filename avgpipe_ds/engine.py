"""What users hold: a DeepSpeed `PipelineEngine` that trains N elastic pipelines instead of one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from avgpipe_ds import checkpoint
from avgpipe_ds import deepspeed_compat as compat
from avgpipe_ds.averaging.reference import Reference
from avgpipe_ds.config import AvgPipeConfig
from avgpipe_ds.ensemble import Ensemble
from avgpipe_ds.errors import AgreedError, AvgPipeError
from avgpipe_ds.evaluating.method import EvaluatesDataSets
from avgpipe_ds.evaluation import evaluate
from avgpipe_ds.execution.collective_call import TRAINING
from avgpipe_ds.execution.pipeline import Pipeline
from avgpipe_ds.execution.stage import Stage
from avgpipe_ds.memory.report import MemoryReport
from avgpipe_ds.preflight.gate import check_engine, tell
from avgpipe_ds.progress import Progress
from avgpipe_ds.tuning.adaptive_advance import AdaptiveAdvance
from avgpipe_ds.tuning.auto_pipelines import choose_pipelines
from avgpipe_ds.tuning.profile import Profile
from avgpipe_ds.tuning.profiler import Profiler
from avgpipe_ds.tuning.session import TuningSession

__all__ = ["AvgPipeEngine", "FurtherPipelines"]


class FurtherPipelines(Protocol):
    """Makes pipelines beside the first, from the weights that training began with."""

    def copies(self, number: int) -> list[Any]:
        """What `number` pipelines are built from; no communication."""

    def build(self, copies: list[Any]) -> list[compat.StageEngine]:
        """Their engines. Collective."""


class AvgPipeEngine(EvaluatesDataSets, compat.StageEngine):
    """N pipelines over the same accelerators, pulled to a reference model (AvgPipe, PPoPP 2023, section 3).

    Made by `avgpipe_ds.initialize`. What differs from DeepSpeed's engine: `train_batch` trains one batch on each of N
    pipelines; evaluation, checkpoints and export use the reference model; batches may come in any shape. `module` and
    `optimizer` are those of pipeline 0, which is this engine. Every method that trains, evaluates, saves or loads is to be
    called by every rank.

    Attributes:
        avgpipe_config: the "avgpipe" block.
        consumed_micro_batches: how many micro-batches of the data the training so far has used up.

    """

    avgpipe_config: AvgPipeConfig
    consumed_micro_batches: int

    def start(self, config: AvgPipeConfig, others: list[compat.StageEngine], *, run: str) -> None:
        """Connect the ranks and begin. Called once, by `initialize`, on every rank."""
        self.avgpipe_config = config
        self.consumed_micro_batches = 0
        self._progress = Progress()
        self._unchecked = config.preflight is not False
        self._session: TuningSession | None = None
        self._further: FurtherPipelines | None = None
        self._run = run
        self._ensemble = Ensemble(config, [self, *others], run=run)
        self.restart(iteration=0)

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
    def pipelines(self) -> tuple[Pipeline, ...]:
        """The N pipelines of this rank; each has `.module` and `.optimizer`."""
        return self._ensemble.pipelines

    @property
    def reference(self) -> Reference | None:
        """This stage's shard of the reference model; None with one pipeline, which then is the model."""
        return self._ensemble.reference

    @property
    def advance(self) -> AdaptiveAdvance:
        """How `"advance": "auto"` stands; without effect if the configuration gives a number."""
        return self._ensemble.advance

    @property
    def num_pipelines(self) -> int:
        """N."""
        return len(self.pipelines)

    @property
    def iteration(self) -> int:
        """How many iterations have been trained."""
        return self._iteration

    @property
    def metrics(self) -> dict[str, Tensor]:
        """What `loss_fn` reported beside the loss in the last `train_batch`, scalars on every rank, averaged as the loss is.

        That is the mean over micro-batches, pipelines and data-parallel replicas. Empty before, and for a loss alone.
        """
        return dict(self.agg_additional_losses or {})

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
            Scalar: the mean of the losses of the N batches, over all data-parallel replicas, on every rank. What a `loss_fn`
            that returns `(loss, {name: scalar})` reports is in `metrics`, and DeepSpeed's monitor gets it as "Train/<name>".

        Raises:
            DataExhausted: on every rank, when the data has ended exactly before this iteration.
            IncompleteIteration: on every rank, when it has ended within it.
            NonFiniteLoss, PeerLost, RemoteError: training can't go on.
            PreflightError: on every rank, `"preflight"` is wanted and found errors.

        """
        if not torch.is_grad_enabled():
            raise RuntimeError("train_batch() needs gradients enabled; use eval_batch() to evaluate")
        if self._unchecked:
            self._preflight(data_iter)
        with self._ensemble.together(TRAINING):
            with self._ensemble.trace.iteration(self._iteration):
                loss, seconds = self._train_iteration(data_iter)
            chosen = self._learn_from_iteration(seconds)
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
        with self._ensemble.together("eval_batch"), self.reference_weights():
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
        with self._ensemble.together(name):
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
        if self._session is not None or self._ensemble.trace.pending:
            busy = "tuning" if self._session is not None else "a timeline (avgpipe.trace)"
            raise AvgPipeError(f"{busy} is under way and measures the same iterations: profile after it")
        if self._unchecked:
            self._preflight(data_iter)
        profiler, saved = self._profiler(), None
        with self._ensemble.together("profile"):
            if not keep:
                self._ensemble.hold_data(self._iteration, self._data_of(data_iter))
                saved = checkpoint.snapshot(self)
            profiler.begin()
        try:
            for _ in range(iterations):
                self.train_batch(data_iter)
            with self._ensemble.together("the end of profile"):
                return profiler.finish()
        finally:
            profiler.abandon()
            if saved is not None and self._ensemble.together.usable:
                self._restore(saved)

    def memory_report(self) -> MemoryReport:
        """What training needs of every accelerator's memory, by kind; every rank calls it, after an iteration at least.

        Activations are those of the first iterations of this engine: counted by autograd's hooks on CPU, by the
        allocator on CUDA.

        Raises:
            AvgPipeError: on every rank, if one could not measure: nothing was trained yet, or the user's own hooks were in force.

        """
        stage = self._stage
        with self._ensemble.together("memory_report"):
            unknown = stage.activations.micro_batch_bytes is None
            problem = AvgPipeError(f"memory_report(): {stage.activations.why_nothing}") if unknown else None
            stage.rendezvous.agree(("memory known",), stage.topology.world_ranks, problem)
            mine = self._ensemble.memory(self._iteration)
            return MemoryReport(stages=tuple(stage.rendezvous.gather(("memory",), stage.topology.world_ranks, mine)))

    def reference_state_dict(self) -> dict[str, Tensor]:
        """This stage's shard of the reference model: fp32 copies, names as in `module.state_dict()`.

        With bf16 or ZeRO-1 and several data-parallel replicas it gathers partitions: then all replicas call it.
        """
        with self.reference_weights():
            exact = {} if self.reference is None else self.reference.parameters()
            if self.reference is None:
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
        with self._ensemble.together(f"save_checkpoint with tag {tag!r}"):
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
        with self._ensemble.together(f"load_checkpoint with tag {tag!r} and load_module_only={weights_only}"):
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
        self._ensemble.close(reason)

    def restart(self, iteration: int) -> None:
        """Give up what is in flight and continue from the present weights with `iteration`.

        Every rank does so at the same point.
        """
        self._iteration = iteration
        self._ensemble.restart(iteration)

    def reference_weights(self, *, masters: bool = False) -> AbstractContextManager[None]:
        """Inside the block, `module` holds the reference model; nothing is copied in fp32.

        Args:
            masters: whether the optimizer's master weights are the reference's, too.

        """
        return self._ensemble.reference_weights(masters=masters)

    @property
    def _stage(self) -> Stage:
        return self._ensemble.stage

    def _profiler(self) -> Profiler:
        return Profiler(self._stage, self.pipelines, self.avgpipe_config.averaging)

    def _restore(self, saved: dict[str, Any]) -> None:
        """As before a profile that was not to be kept."""
        with self._ensemble.together("the restoration after profile"):
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

    def _data_of(self, data_iter: Iterator[Any] | None) -> Iterator[Any] | None:
        """The iterator of this call: DeepSpeed's own unless there is another."""
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        data: Iterator[Any] | None = self.data_iterator
        return data

    def _preflight(self, data_iter: Iterator[Any] | None) -> None:
        """Check one micro-batch before training, once there is data.

        Raises:
            PreflightError: on every rank, there are errors.
            SystemExit: `avgpipe-check` wants nothing else; with status 1 if there are errors, else 0.

        """
        wanted = self.avgpipe_config.preflight
        file = wanted if isinstance(wanted, str) else None
        with self._ensemble.together("the check before training"):
            self._ensemble.hold_data(self._iteration, self._data_of(data_iter))
            report = check_engine(self, self._stage, self._stage.feed.let_go())
            if report is None:
                return
            self._unchecked = False
            tell(report, self._stage, file)
        if file is not None:
            self.close("its model was checked")
            raise SystemExit(1 if report.errors else 0)

    def _train_iteration(self, data_iter: Iterator[Any] | None) -> tuple[Tensor, float]:
        """The loss of an iteration, and how long it took this rank, in seconds."""
        if self._session is not None and self._session.ends_with_next:
            self._stage.last = self._iteration
        seconds = self._ensemble.train(self._iteration, self._data_of(data_iter))
        self._iteration += 1
        self.consumed_micro_batches += self.num_pipelines * self._stage.num_micro_batches
        return self._progress.report(self, self.pipelines, self._iteration), seconds

    def _learn_from_iteration(self, seconds: float) -> AvgPipeConfig | None:
        """What an iteration tells of the advance, and of N: then the configuration to go on with.

        Raises:
            Exception: tuning failed; it is the same on all ranks, and the engine has stopped.

        """
        if self._session is not None:
            try:
                return self._session.trained(self._profiler)
            except AgreedError as error:
                raise error.error from error
        if self.avgpipe_config.schedule.advance == "auto":
            self.advance.trained(self._iteration - 1, seconds)
        return None

    def _go_on_with(self, config: AvgPipeConfig, *, keep_data: bool) -> None:
        """Train as many pipelines as `config` says from here on, all from the present state; what is under way is given up.

        With `keep_data` nothing is under way, and data that was taken ahead is trained next.

        Raises:
            Exception: on every rank, if one of them can't copy its stage.

        """
        first, old, further = self.pipelines[0], self._ensemble, self._further
        assert further is not None
        self._session, self._further, old.stage.last = None, None, None
        rendezvous, everybody = old.stage.rendezvous, old.stage.topology.world_ranks
        with old.together("the change of num_pipelines"):
            copies, problem = [], None
            try:
                self._check_still_trainable()
                copies = further.copies(config.first_num_pipelines - 1)
            except Exception as error:  # noqa: BLE001 - told to all ranks, before any of them waits for the others inside DeepSpeed
                problem = error
            rendezvous.agree(("reconnect",), everybody, problem)
            others = further.build(copies)
            random = first.random.state_dict()
            rendezvous.gather(("reconnected",), everybody)  # nobody needs an answer of this rank any more
            old.disconnect()
            self.avgpipe_config, self._ensemble = config, Ensemble(config, [self, *others], run=self._run)
            self.pipelines[0].random.load_state_dict(random)
            checkpoint.start_from_first(self, weights_only=False)
            if keep_data:
                self._stage.feed.inherit(old.stage.feed, self._iteration)

    def _adopt(self, load_dir: str, tag: str | None) -> None:
        """Where N is still to be found out, that of a checkpoint of several pipelines is taken."""
        with self._ensemble.together("load_checkpoint while num_pipelines is being tuned"):
            state = checkpoint.read(self, load_dir, tag, weights_only=False, any_number=True)
        number = 1 if state is None else state["shape"]["num_pipelines"]
        if number > 1:
            self._go_on_with(self.avgpipe_config.with_pipelines(number), keep_data=False)

    def _check_still_trainable(self) -> None:
        """Further pipelines are copied from what the first was at the start.

        Raises:
            AvgPipeError: `requires_grad` was changed since then.

        """
        if self._ensemble.trainable_changed:
            raise AvgPipeError('parameters were frozen or unfrozen while "num_pipelines": "auto" was found out: give a number')
