"""The reference: one process, transformers and torch, no pipeline and no DeepSpeed."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from common.evaluation import Validation
from common.training import TaskData

from accuracy.records import Conditions
from accuracy.task import CLIPPING, EVAL_MICRO_BATCH_SIZE, WEIGHT_DECAY
from accuracy.trainer import warm_up
from avgpipe_ds.data import BatchShape, MicroBatch, evaluation_batches

__all__ = ["TorchTrainer"]


class TorchTrainer:
    """Trains `model`, one micro-batch an iteration."""

    def __init__(self, model: Any, data: TaskData, conditions: Conditions, *, learning_rate: float) -> None:
        """Make the optimizer; `model` is trained in place."""
        self.shape = BatchShape(num_pipelines=1, num_replicas=1, num_micro_batches=1, micro_batch_size=conditions.batch_size)
        self._model, self._data = model, data
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=WEIGHT_DECAY, fused=True)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._optimizer, warm_up(conditions, self.shape))

    def train_iteration(self, batches: Iterator[MicroBatch]) -> float:
        """Train the next micro-batch."""
        self._model.train()
        (input_ids, attention_mask), (labels, weights) = next(batches)
        logits = self._model(input_ids=input_ids, attention_mask=attention_mask).logits
        loss = (F.cross_entropy(logits, labels, reduction="none") * weights).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), CLIPPING)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._schedule.step()
        return float(loss.detach())

    @torch.no_grad()
    def validate(self) -> Validation:
        """Validate, in the micro-batches that the engines are given, too."""
        self._model.eval()
        samples = self._data.validation
        total_loss, correct = 0.0, 0
        for batch in evaluation_batches(samples, self._data.collate, micro_batch_size=EVAL_MICRO_BATCH_SIZE):
            (input_ids, attention_mask), (labels, weights) = batch
            logits = self._model(input_ids=input_ids, attention_mask=attention_mask).logits
            total_loss += float((F.cross_entropy(logits, labels, reduction="none") * weights).sum())
            correct += int(((logits.argmax(dim=-1) == labels) & (weights > 0)).sum())
        return Validation(loss=total_loss / len(samples), num_samples=len(samples), accuracy=correct / len(samples))

    def close(self) -> None:
        """Nothing to release."""
