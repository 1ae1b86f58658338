"""This project's engine: N elastic-averaged pipelines."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

import avgpipe_ds
from bench.contenders.base import Contender, Training
from bench.contenders.deepspeed_pipeline import DeepSpeedTraining, deepspeed_config, pipeline_module
from bench.costs import memory_of
from bench.memory import Memory
from bench.workload import Workload

__all__ = ["Elastic"]


class _Training(DeepSpeedTraining):
    def parameters(self) -> Iterable[nn.Parameter]:
        return [parameter for pipeline in self.engine.pipelines for parameter in pipeline.module.parameters()]

    def weights(self) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.engine.reference_state_dict()
        return state

    def memory(self) -> Memory:
        return Memory(**memory_of(self.engine))

    def close(self) -> None:
        self.engine.close()


@dataclass(frozen=True, kw_only=True)
class Elastic(Contender):
    """N pipelines; each trains a batch of B samples per optimizer step.

    Attributes:
        schedule: "1f1b", "gpipe" or "advance_forward".
        advance: extra forwards, with "advance_forward".
        trace: folder for its timelines, in a folder of its own; None for none.
    """

    schedule: str = "1f1b"
    advance: int = 0
    trace: str | None = None

    def build(self, workload: Workload, num_micro_batches: int) -> Training:
        """As a user would."""
        block: dict[str, Any] = {
            "num_pipelines": self.num_pipelines,
            "schedule": {"name": self.schedule, "advance": self.advance},
            "trace": None if self.trace is None else f"{self.trace}/{self.key}",
        }
        engine, *_ = avgpipe_ds.initialize(
            model=pipeline_module(workload),
            optimizer=workload.make_optimizer,
            config=deepspeed_config(workload, num_micro_batches) | {"avgpipe": block},
        )
        return _Training(engine, workload.micro_batches(num_micro_batches))
