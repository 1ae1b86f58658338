"""Forward only, on the reference model, beside training work that is merely paused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from avgpipe_ds import deepspeed_compat as compat
from avgpipe_ds.data_feed import MicroBatch
from avgpipe_ds.errors import AgreedError
from avgpipe_ds.execution.executor import Executor, Stream, Wait
from avgpipe_ds.execution.loss_record import split_loss
from avgpipe_ds.execution.stage import Stage
from avgpipe_ds.execution.tensors import as_tuple, check_stage_output
from avgpipe_ds.transport.message import Message

__all__ = ["evaluate", "forward_all"]

_CHANNEL = "evaluation"
_OUTPUTS = "evaluation-outputs"


def evaluate(
    engine: compat.StageEngine,
    stage: Stage,
    data_iter: Iterator[Any] | None,
    *,
    num_micro_batches: int,
    return_outputs: bool,
    compute_loss: bool,
    reduce_output: str | None,
    share_loss: bool,
) -> Any:
    """`AvgPipeEngine.eval_batch`, with the reference's weights already in `engine.module`. Every rank calls it.

    The ranks first tell each other what they want and whether they have their data, so bad data is an error on all of them
    before anything is sent.
    """
    topology, meet = stage.topology, stage.rendezvous
    fits = isinstance(num_micro_batches, int) and num_micro_batches >= 1 and reduce_output in ("avg", None)
    items, error = _take(stage, data_iter, num_micro_batches) if fits else ([], None)
    settings = f"num_micro_batches={num_micro_batches!r}, compute_loss={compute_loss}, reduce_output={reduce_output!r}"
    if not fits:
        error = ValueError(
            f'eval_batch wants num_micro_batches as an integer from 1 and reduce_output "avg" or None, got {settings}'
        )
    wishes = meet.agree(("evaluate",), topology.world_ranks, error, (settings, return_outputs))
    different = sorted({theirs for theirs, _ in wishes})
    if len(different) > 1:
        raise AgreedError(
            ValueError(f"eval_batch was called differently on different ranks, pass the same on all: {' / '.join(different)}")
        )
    asks = {rank: wants for rank, (_, wants) in zip(topology.world_ranks, wishes, strict=True)}
    listeners = tuple(rank for rank in topology.pipeline_ranks if asks[rank])
    work = _Evaluation(engine, stage, items, num_micro_batches, compute_loss, listeners)
    work.run()
    result = _result(work, compute_loss=compute_loss, reduce_output=reduce_output, share_loss=share_loss)
    return (result, work.outputs) if return_outputs else result


def forward_all(
    engine: compat.StageEngine, stage: Stage, inputs: Sequence[Any], count: int, finish: Callable[[int, Any], None]
) -> None:
    """Micro-batches through the stages of this replica, one after the other, without gradients. All its ranks call it.

    Args:
        engine: whose module computes.
        stage: this rank's place.
        inputs: of the micro-batches; looked at on the first stage only.
        count: how many micro-batches.
        finish: told the number and the outputs of each micro-batch, on the last stage.

    """
    executor = Executor(stage.mailbox, stage.recorder)
    executor.add(_forwards(engine, stage, inputs, count, finish))
    executor.run(lambda: executor.idle)


def _forwards(
    engine: compat.StageEngine, stage: Stage, inputs: Sequence[Any], count: int, finish: Callable[[int, Any], None]
) -> Stream:
    topology, mailbox = stage.topology, stage.mailbox
    for number in range(count):
        if topology.is_first:
            values = inputs[number]
        else:
            yield Wait(lambda: mailbox.has(_CHANNEL), (0,), "evaluation")
            values = _tensors(mailbox.take(_CHANNEL))
        with torch.no_grad():
            outputs = compat.forward(engine, values)
            if topology.is_last:
                finish(number, outputs)
        if not topology.is_last:
            check_stage_output(outputs, topology.stage_id)
            mailbox.send(topology.next_rank, _CHANNEL, isinstance(outputs, tuple), as_tuple(outputs))
    yield Wait(lambda: True, (0,), "evaluation")


def _tensors(message: Message) -> Any:
    return message.tensors if message.payload else message.tensors[0]


def _take(stage: Stage, data_iter: Iterator[Any] | None, count: int) -> tuple[list[MicroBatch], Exception | None]:
    """The next `count` micro-batches, or what is wrong with them."""
    items: list[MicroBatch] = []
    if not stage.topology.takes_data:
        return items, None
    try:
        if not hasattr(data_iter, "__next__"):
            raise TypeError(f"data_iter must be an iterator, got a {type(data_iter).__name__}: pass iter(loader)")
        while len(items) < count:
            items.append(stage.feed.prepare(next(data_iter)))  # type: ignore[arg-type]
    except StopIteration:
        hint = f": pass num_micro_batches={len(items)}" if items else ", the iterator is empty"
        return items, ValueError(f"eval_batch takes {count} micro-batches, the iterator gave {len(items)}{hint}")
    except Exception as error:  # noqa: BLE001 - told to all ranks
        return items, error
    return items, None


def _result(work: _Evaluation, *, compute_loss: bool, reduce_output: str | None, share_loss: bool) -> Any:
    topology = work.stage.topology
    if not compute_loss or reduce_output is None:
        if not topology.is_last:
            return None
        return work.losses if reduce_output is None else sum(work.losses[1:], work.losses[0]) / len(work.losses)
    mine = _mean(work.losses) if topology.is_last else None
    told = work.stage.rendezvous.gather(("evaluated",), topology.world_ranks, mine)
    losses = [loss for loss in told if loss is not None]
    if not topology.is_last and not share_loss:
        return None
    return torch.tensor(sum(losses) / len(losses), dtype=torch.float32, device=work.stage.device)


@dataclass(slots=True)
class _Evaluation:
    """One `eval_batch` on this stage.

    Attributes:
        engine: whose module computes, with the reference's weights in it.
        items: the micro-batches, on the first and the last stage.
        listeners: the ranks of this replica that want the outputs.
        outputs: the last stage's outputs, one per micro-batch, on listeners.
        losses: one per micro-batch, on the last stage.

    """

    engine: compat.StageEngine
    stage: Stage
    items: list[MicroBatch]
    num_micro_batches: int
    compute_loss: bool
    listeners: tuple[int, ...]
    outputs: list[Any] = field(default_factory=list)
    losses: list[Any] = field(default_factory=list)

    def run(self) -> None:
        """The forwards of all micro-batches in order, then the outputs that this rank asked for."""
        topology, mailbox = self.stage.topology, self.stage.mailbox
        forward_all(self.engine, self.stage, [inputs for inputs, _ in self.items], self.num_micro_batches, self._finish)
        if topology.rank in self.listeners and not topology.is_last:
            while len(self.outputs) < self.num_micro_batches:
                while not mailbox.has(_OUTPUTS):
                    mailbox.wait()
                self.outputs.append(_tensors(mailbox.take(_OUTPUTS)))

    def _finish(self, number: int, outputs: Any) -> None:
        loss_fn = self.engine.module.loss_fn
        labels = self.items[number][1]
        loss = loss_fn(outputs, labels) if self.compute_loss and loss_fn is not None else outputs
        self.losses.append(split_loss(loss)[0] if self.compute_loss else loss)
        if not self.listeners:
            return
        check_stage_output(outputs, self.stage.topology.stage_id)
        tensors = as_tuple(outputs)
        for rank in self.listeners:
            if rank == self.stage.topology.rank:
                self.outputs.append(outputs)
            else:
                self.stage.mailbox.send(rank, _OUTPUTS, isinstance(outputs, tuple), tensors)


def _mean(losses: list[Tensor]) -> float:
    """Mean of scalar losses.

    Raises:
        ValueError: a loss is not a scalar.

    """
    for loss in losses:
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise ValueError(f"eval_batch averages scalar losses, got {found}: pass compute_loss=False or reduce_output=None")
    return float(sum(losses, torch.zeros_like(losses[0])) / len(losses))
