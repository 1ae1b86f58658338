"""Where a training stands: transformers' own `TrainerState`."""

from __future__ import annotations

import math
from pathlib import Path

import torch.distributed as dist
from transformers import TrainerState

from avgpipe_ds.trainer.arguments import PipelineTrainingArguments
from avgpipe_ds.trainer.build import Parts
from avgpipe_ds.trainer.checkpoints import STATE_FILE

__all__ = ["new_state", "resumed_state"]

_RESUMED = (
    "epoch",
    "global_step",
    "log_history",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
    "stateful_callbacks",
)


def new_state(args: PipelineTrainingArguments, parts: Parts) -> TrainerState:
    """At the beginning, on this rank."""
    state = TrainerState(
        max_steps=parts.num_steps,
        num_train_epochs=math.ceil(parts.num_steps / parts.batches.iterations_per_epoch),
        train_batch_size=args.per_device_train_batch_size,
        is_world_process_zero=dist.get_rank() == 0,
        is_local_process_zero=parts.engine.local_rank <= 0,
    )
    state.compute_steps(args, parts.num_steps)
    return state


def resumed_state(args: PipelineTrainingArguments, parts: Parts, folder: Path) -> TrainerState:
    """As a checkpoint has it; how long training goes on, and when what is due, is as the arguments say now."""
    state, saved = new_state(args, parts), TrainerState.load_from_json(str(folder / STATE_FILE))
    for name in _RESUMED:
        setattr(state, name, getattr(saved, name))
    return state
