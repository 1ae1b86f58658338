"""DeepSpeed's engine and ours, built alike."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from common.evaluation import Validation, validate
from common.training import TaskData
from torch import Tensor

import avgpipe_ds
from accuracy.records import Conditions
from accuracy.settings import Setting
from accuracy.task import CLIPPING, EVAL_MICRO_BATCH_SIZE, WEIGHT_DECAY
from accuracy.trainer import warm_up
from avgpipe_ds import hf
from avgpipe_ds.data import BatchShape, MicroBatch
from avgpipe_ds.errors import NonFiniteLoss, RemoteError

__all__ = ["EngineTrainer", "engine_trainer"]


class EngineTrainer:
    """Trains an engine, and validates its reference model; DeepSpeed's only model where there is no other."""

    def __init__(self, engine: Any, data: TaskData, *, shape: BatchShape) -> None:
        """`engine` is DeepSpeed's or ours."""
        self.shape = shape
        self._engine, self._data = engine, data
        self._is_ours = isinstance(engine, avgpipe_ds.AvgPipeEngine)
        self._validated = engine if self._is_ours else _OneAtATime(engine)

    def train_iteration(self, batches: Iterator[MicroBatch]) -> float:
        """Train a batch on every pipeline."""
        try:
            return float(self._engine.train_batch(batches))
        except NonFiniteLoss:
            return math.nan
        except RemoteError as error:  # the last stage looks at the loss, the others hear of it
            if not error.text.startswith(NonFiniteLoss.__name__):
                raise
            return math.nan

    def validate(self) -> Validation:
        """Validate with the recipes' own evaluation."""
        return validate(self._validated, self._data.validation, self._data.collate, micro_batch_size=EVAL_MICRO_BATCH_SIZE)

    def close(self) -> None:
        """Release threads and connections; DeepSpeed's engine has none of its own."""
        if self._is_ours:
            self._engine.close()


def engine_trainer(
    setting: Setting, model: Any, data: TaskData, conditions: Conditions, *, learning_rate: float, num_micro_batches: int
) -> EngineTrainer:
    """Build the engine of `setting`. Every rank calls it.

    Args:
        setting: which engine.
        model: transformers' model with the weights to start from, which are copied.
        data: for validation.
        conditions: batch size and warm-up.
        learning_rate: after the warm-up.
        num_micro_batches: M; divides the batch of a pipeline.

    """
    shape = BatchShape(
        num_pipelines=setting.num_pipelines,
        num_replicas=1,
        num_micro_batches=num_micro_batches,
        micro_batch_size=int(conditions.batch_size * setting.batch_factor) // num_micro_batches,
    )
    factor = warm_up(conditions, shape)
    module = hf.to_pipeline(model, num_stages=dist.get_world_size(), task="sequence-classification")
    arguments: dict[str, Any] = {
        "model": module,
        "model_parameters": list(module.parameters()),
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=WEIGHT_DECAY, fused=True),
        "lr_scheduler": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, factor),
    }
    config = {
        "train_micro_batch_size_per_gpu": shape.micro_batch_size,
        "gradient_accumulation_steps": num_micro_batches,
        "gradient_clipping": CLIPPING,
        "steps_per_print": 10**9,
    }
    if setting.averaging is None:
        engine = deepspeed.initialize(**arguments, config=config)[0]
    else:
        block = {"num_pipelines": setting.num_pipelines, "averaging": setting.averaging}
        engine = avgpipe_ds.initialize(**arguments, config={**config, "avgpipe": block})[0]
    return EngineTrainer(engine, data, shape=shape)


class _OneAtATime:
    """DeepSpeed's engine as validation wants it: `eval_batch` with the logits of all micro-batches, not of the last one only."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.grid, self.device, self.is_last_stage = engine.grid, engine.device, engine.is_last_stage

    def eval_batch(self, data_iter: Iterator[MicroBatch], return_logits: bool, num_micro_batches: int) -> Any:
        losses: list[Tensor] = []
        outputs: list[Tensor] = []
        for _ in range(num_micro_batches):
            result = self._engine.eval_batch(data_iter, return_logits=return_logits, num_micro_batches=1)
            loss, logits = result if return_logits else (result, None)
            losses.append(loss)
            if logits is not None:
                outputs.append(logits)
        mean = torch.stack(losses).mean()
        return (mean, outputs) if return_logits else mean
