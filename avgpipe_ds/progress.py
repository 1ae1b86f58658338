"""What an engine tells its user after an iteration: DeepSpeed's log line and monitor events, for N pipelines."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from avgpipe_ds import deepspeed_compat as compat
from avgpipe_ds.announce import announce
from avgpipe_ds.execution.loss_record import LOSS, mean_of
from avgpipe_ds.execution.pipeline import Pipeline

__all__ = ["Progress"]


class Progress:
    """Reports iterations; on rank 0 also to the log and to DeepSpeed's monitors."""

    def __init__(self) -> None:
        self._since = (time.perf_counter(), 0)

    def report(self, engine: compat.StageEngine, pipelines: Sequence[Pipeline], iteration: int) -> Tensor:
        """The iteration's loss: the mean over pipelines, a scalar. Also sets DeepSpeed's attributes for what was averaged."""
        engine.global_samples += (len(pipelines) - 1) * int(engine.train_batch_size())
        means = mean_of([pipeline.losses for pipeline in pipelines])
        loss = torch.tensor(means.pop(LOSS), dtype=torch.float32, device=engine.device)
        engine.agg_train_loss = loss
        engine.agg_additional_losses = {name: torch.tensor(value, device=engine.device) for name, value in means.items()} or None
        if engine.global_rank == 0:
            if engine.monitor.enabled:
                events = {"Train/Samples/train_loss": loss.item()} | {f"Train/{name}": mean for name, mean in means.items()}
                engine.monitor.write_events([(name, value, engine.global_samples) for name, value in events.items()])
            self._log(engine, loss, len(pipelines), iteration)
        return loss

    def _log(self, engine: compat.StageEngine, loss: Tensor, num_pipelines: int, iteration: int) -> None:
        every = engine.steps_per_print()
        if not every or engine.global_steps % every:
            return
        (then, trained), now = self._since, time.perf_counter()
        seconds = (now - then) / max(1, iteration - trained)
        self._since = (now, iteration)
        speed = num_pipelines * engine.train_batch_size() / seconds
        announce(f"steps: {engine.global_steps} loss: {loss:.4f} iter time (s): {seconds:.3f} samples/sec: {speed:.3f}")
