"""One pipeline on one stage: DeepSpeed's instructions, each carried out on slots that belong to one micro-batch.

DeepSpeed's own engine runs an instruction list from front to back and blocks in it. Here the list is a stream that the executor
resumes: it waits for messages, data and peers without blocking, and everything a backward needs lies in its micro-batch's slot,
so any number of forwards may run ahead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar, cast

import torch
from deepspeed.runtime.pipe import schedule as ds
from torch import Tensor

from avgpipe_ds import deepspeed_compat as compat
from avgpipe_ds.errors import NonFiniteLoss
from avgpipe_ds.execution.executor import Stream, Wait
from avgpipe_ds.execution.loss_record import Losses, LossRecord, mean_of
from avgpipe_ds.execution.reductions import reduce_gradients, reduce_tied_gradients
from avgpipe_ds.execution.stage import Stage
from avgpipe_ds.execution.tensors import as_tuple, check_stage_output
from avgpipe_ds.random_state import RandomState
from avgpipe_ds.schedules.actions import Kind
from avgpipe_ds.schedules.deepspeed_schedules import AdvanceForwardPass, PlannedSchedule
from avgpipe_ds.schedules.priority import priority
from avgpipe_ds.tracing.spans import CLIPPING_NORM, OPTIMIZER_STEP, WAIT

__all__ = ["Pipeline"]

T = TypeVar("T")


@dataclass(slots=True)
class _Slot:
    """One micro-batch between its forward and its backward.

    Attributes:
        inputs: what the stage computes on; received ones are leaves that collect the gradient to send back.
        labels: last stage only.
        outputs: those outputs that a gradient comes back for; the loss on the last stage.
        gradients: received for `outputs`, in their order.
        sent: all outputs, until they are sent.

    """

    inputs: Any = None
    labels: Any = None
    outputs: tuple[Tensor, ...] = ()
    gradients: tuple[Tensor, ...] = ()
    sent: Any = None


class Pipeline:
    """Pipeline `pipeline_id` of N, as far as it runs on this rank.

    Args:
        pipeline_id: i, 0 .. N-1.
        engine: DeepSpeed's engine of this pipeline: module, optimizer, learning-rate scheduler.
        stage: what the pipelines of this rank share.
        schedule: the instructions of the batch of an iteration.

    Attributes:
        iteration: the iteration whose instructions are being run; may be one ahead of `Stage.training`.
        schedule: the instructions of the batch of an iteration.
        losses: means of the loss and of the metrics beside it, of the last batch that was stepped on.
        on_step: called after each optimizer step.

    """

    def __init__(
        self, pipeline_id: int, engine: compat.StageEngine, stage: Stage, schedule: Callable[[int], PlannedSchedule]
    ) -> None:
        self.pipeline_id = pipeline_id
        self.engine = engine
        self.stage = stage
        self.random = RandomState(stage.device, pipeline_id)
        self.iteration = 0
        self.losses: Losses = {}
        self.on_step: Callable[[Pipeline], None] = lambda pipeline: None
        self.schedule = schedule
        self._slots: dict[int, _Slot] = {}
        self._record = LossRecord()
        self._batch_losses: Losses = {}
        self.start_of_iteration = self._capture()

    @property
    def module(self) -> compat.PipelineModule:
        """This stage's layers of this pipeline's parallel model w_i."""
        return self.engine.module

    @property
    def optimizer(self) -> Any:
        """This pipeline's optimizer, as DeepSpeed wrapped it."""
        return self.engine.optimizer

    def give_up(self) -> None:
        """Forget what is in flight."""
        self._slots.clear()

    def restart(self, iteration: int) -> None:
        """Give up what is in flight and begin `iteration` with the next stream."""
        self.iteration = iteration
        self.give_up()
        compat.discard_gradients(self.engine)

    def stream(self) -> Stream:
        """The instructions of all iterations from `iteration` on."""
        while True:
            if not self.stage.may_begin(self.iteration):
                yield from self._until("turn", lambda: self.stage.may_begin(self.iteration))
            self.start_of_iteration = self._capture()
            self._record.begin()
            self._batch_losses = {}
            for instructions in self.schedule(self.iteration).steps():
                if isinstance(instructions[-1], ds.OptimizerStep):
                    yield from self._finish_batch()
                    continue
                kind: Kind = "B" if any(isinstance(i, ds.BackwardPass) for i in instructions) else "F"
                key = priority(iteration=self.iteration, pipeline_id=self.pipeline_id, kind=kind)
                waits_for, ready = self._readiness(instructions)
                yield from self._wait(Wait(ready, (1, *key), waits_for))
                for instruction in instructions:
                    with self._span(instruction.name, micro_batch=instruction.kwargs["micro_batch"]):
                        self._INSTRUCTION_MAP[type(instruction)](self, **instruction.kwargs)
            self.iteration += 1

    def _capture(self) -> tuple[dict[str, Any], list[Tensor]]:
        """Random state and buffers at the start of an iteration: forwards that run ahead change both."""
        return self.random.state_dict(), [b.detach().clone() for b in self.module.buffers()]

    def _readiness(self, instructions: list[ds.PipeInstruction]) -> tuple[str, Callable[[], bool]]:
        """What the first computation of a step waits for, its message or its data, and whether that is there."""
        mailbox, feed = self.stage.mailbox, self.stage.feed
        conditions: dict[str, Callable[[], bool]] = {}
        for instruction in instructions:
            if isinstance(instruction, ds.RecvActivation):
                conditions["activation"] = lambda: mailbox.has(("activation", self.pipeline_id))
            elif isinstance(instruction, ds.RecvGrad):
                conditions["gradient"] = lambda: mailbox.has(("gradient", self.pipeline_id))
            elif isinstance(instruction, ds.LoadMicroBatch):
                conditions["data"] = lambda: feed.ready(self.iteration)
        return next(iter(conditions), "turn"), lambda: all(condition() for condition in conditions.values())

    def _load_micro_batch(self, buffer_id: int, micro_batch: int) -> None:
        index = self.pipeline_id * self.stage.num_micro_batches + micro_batch
        inputs, labels = self.stage.feed.take(self.iteration, index)
        slot = self._slots.setdefault(buffer_id, _Slot())
        slot.labels = labels
        if self.stage.topology.is_first:
            slot.inputs = inputs
            if compat.needs_inputs_with_gradient(self.engine):
                for tensor in as_tuple(inputs):
                    tensor.requires_grad_(tensor.is_floating_point())

    def _receive_activation(self, buffer_id: int, micro_batch: int) -> None:
        message = self.stage.mailbox.take(("activation", self.pipeline_id))
        iteration, number, is_tuple = message.payload
        assert (iteration, number) == (self.iteration, micro_batch), f"got {iteration, number}, not {self.iteration, micro_batch}"
        for tensor, flag in zip(message.tensors, message.requires_grad, strict=True):
            tensor.requires_grad_(flag)
        self._slots[buffer_id] = _Slot(inputs=message.tensors if is_tuple else message.tensors[0])

    def _forward(self, buffer_id: int, micro_batch: int) -> None:
        slot, last = self._slots[buffer_id], self.stage.topology.is_last
        if self.stage.capture is not None:
            self.stage.capture(slot.inputs, slot.labels)
        # Cloned, as in DeepSpeed, so that a first layer may work in place.
        inputs = tuple(t.clone() for t in slot.inputs) if isinstance(slot.inputs, tuple) else slot.inputs.clone()
        with self.random.active(), self.stage.activations.forward():
            outputs = compat.forward(self.engine, inputs)
            if last:
                loss_fn = self.module.loss_fn
                outputs = outputs if loss_fn is None else loss_fn(outputs, slot.labels)
        if last:
            loss = self._record.add(outputs, self.module.get_additional_losses() or {})
            slot.outputs, slot.labels = (loss,), None
            return
        check_stage_output(outputs, self.stage.topology.stage_id)
        slot.sent = outputs
        slot.outputs = tuple(t for t in as_tuple(outputs) if t.requires_grad)

    def _send_activation(self, buffer_id: int, micro_batch: int) -> None:
        slot = self._slots[buffer_id]
        tensors = as_tuple(slot.sent)
        payload = (self.iteration, micro_batch, isinstance(slot.sent, tuple))
        self.stage.mailbox.send(
            self.stage.topology.next_rank,
            ("activation", self.pipeline_id),
            payload,
            tensors,
            tuple(t.requires_grad for t in tensors),
        )
        slot.sent = None

    def _receive_gradient(self, buffer_id: int, micro_batch: int) -> None:
        message = self.stage.mailbox.take(("gradient", self.pipeline_id))
        iteration, number, losses = message.payload
        assert (iteration, number) == (self.iteration, micro_batch), f"got {iteration, number}, not {self.iteration, micro_batch}"
        self._slots[buffer_id].gradients = message.tensors
        self._batch_losses.update(losses)

    def _backward(self, buffer_id: int, micro_batch: int) -> None:
        slot = self._slots[buffer_id]
        with self.random.active():
            if self.stage.topology.is_last:
                compat.backward_from_loss(self.engine, slot.outputs[0])
            elif slot.outputs:
                compat.backward_from_gradients(self.engine, slot.outputs, slot.gradients)
        slot.outputs = slot.gradients = ()
        if self.stage.topology.is_last and micro_batch == self.stage.num_micro_batches - 1:
            self._batch_losses = self._mean_losses()
        if self.stage.topology.is_first:
            del self._slots[buffer_id]

    def _mean_losses(self) -> Losses:
        """Losses and metrics of the batch.

        Raises:
            NonFiniteLoss: not with fp16, whose loss scaling deals with it.

        """
        finite = torch.isfinite(self._record.losses)
        if not bool(finite.all()) and not self.engine.fp16_enabled():
            bad = int((~finite).nonzero()[0])
            raise NonFiniteLoss(
                f"the loss is {self._record.losses[bad].item()} in pipeline {self.pipeline_id}, iteration {self.iteration}, "
                f"micro-batch {bad}: "
                "try a lower learning rate, gradient clipping, or look at that micro-batch (a mean over no samples is nan, too)"
            )
        return self._record.means()

    def _send_gradient(self, buffer_id: int, micro_batch: int) -> None:
        wanted = [t for t in as_tuple(self._slots.pop(buffer_id).inputs) if t.requires_grad]
        gradients = tuple(torch.zeros_like(t) if t.grad is None else t.grad for t in wanted)
        losses = self._batch_losses if micro_batch == self.stage.num_micro_batches - 1 else {}
        payload = (self.iteration, micro_batch, losses)  # losses travel beside the gradients: a collective would be a barrier
        self.stage.mailbox.send(self.stage.topology.previous_rank, ("gradient", self.pipeline_id), payload, gradients)

    _INSTRUCTION_MAP: ClassVar[dict[type[ds.PipeInstruction], Callable[..., None]]] = {
        ds.LoadMicroBatch: _load_micro_batch,
        ds.ForwardPass: _forward,
        AdvanceForwardPass: _forward,
        ds.BackwardPass: _backward,
        ds.SendActivation: _send_activation,
        ds.RecvActivation: _receive_activation,
        ds.SendGrad: _send_gradient,
        ds.RecvGrad: _receive_gradient,
    }

    def _finish_batch(self) -> Generator[Wait, None, None]:
        """ReduceTiedGrads, ReduceGrads and OptimizerStep: everything that needs the peers."""
        stage, key = self.stage, (self.iteration, self.pipeline_id)
        topology, meet = stage.topology, stage.rendezvous
        yield from self._until("turn", lambda: stage.may_finish(self.iteration))
        yield from self._each(reduce_tied_gradients(self.engine, stage, self.pipeline_id))
        yield from self._each(reduce_gradients(self.engine, stage, self.pipeline_id))
        every = yield from self._each(meet.gathering(("losses", key), topology.replica_ranks, self._batch_losses))
        if compat.has_own_collectives(self.engine):  # its step waits for the other ranks: all must have come
            yield from self._each(meet.gathering(("step", key), topology.world_ranks))
        elif self.engine.gradient_clipping() > 0:
            with self._span(CLIPPING_NORM):
                norm = compat.local_squared_norm(self.engine)
            norms = yield from self._each(meet.gathering(("norm", key), topology.pipeline_ranks, norm))
            self.engine.gradient_norm = math.sqrt(sum(norms))
        yield from self._until("turn", lambda: stage.may_step(*key))
        self.losses = mean_of(every)
        with self._span(OPTIMIZER_STEP):
            compat.optimizer_step(self.engine)
        stage.stepped += 1
        self.on_step(self)

    def _span(self, name: str, *, micro_batch: int = -1, detail: str = "") -> AbstractContextManager[None]:
        """Part of this pipeline's timeline."""
        return self.stage.recorder.span(
            name, pipeline_id=self.pipeline_id, iteration=self.iteration, micro_batch=micro_batch, detail=detail
        )

    def _wait(self, wait: Wait) -> Stream:
        with self._span(WAIT, detail=wait.waits_for):
            yield wait

    def _until(self, waits_for: str, ready: Callable[[], bool]) -> Stream:
        """Wait for something that ends the batch; it goes before all computation."""
        return self._wait(Wait(ready, (0, self.iteration, self.pipeline_id), waits_for))

    def _each(self, conditions: Generator[Callable[[], bool], None, T]) -> Generator[Wait, None, T]:
        """Wait for one condition after the other."""
        try:
            while True:
                yield from self._until("peers", next(conditions))
        except StopIteration as end:
            return cast(T, end.value)
