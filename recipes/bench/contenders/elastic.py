"""This project's engine: N elastic-averaged pipelines."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor, nn

import avgpipe_ds
from avgpipe_ds.memory.breakdown import Breakdown
from bench.contenders.base import Contender
from bench.contenders.deepspeed_pipeline import DeepSpeedTraining, deepspeed_config, pipeline_module
from bench.costs import memory_of
from bench.workload import Workload

__all__ = ["Elastic"]


class _Training(DeepSpeedTraining):
    def parameters(self) -> Iterable[nn.Parameter]:
        return [parameter for pipeline in self.engine.pipelines for parameter in pipeline.module.parameters()]

    def weights(self) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.engine.reference_state_dict()
        return state

    def memory(self) -> Breakdown:
        return memory_of(self.engine)

    def close(self) -> None:
        self.engine.close()


@dataclass(frozen=True, kw_only=True)
class Elastic(Contender):
    """N pipelines. Each trains a batch of B samples per optimizer step, or all N together train one.

    Attributes:
        shared: whether the N pipelines share a batch, B / N samples each, so that the reference model moves once per B samples.
        schedule: "1f1b", "gpipe" or "advance_forward".
        advance: extra forwards, with "advance_forward"; or "auto", which finds them out while training.
        trace: folder for its timelines, in a folder of its own; None for none.
    """

    shared: bool = False
    schedule: str = "1f1b"
    advance: int | Literal["auto"] = 0
    trace: str | None = None

    @property
    def num_sharers(self) -> int:
        """Pipelines that train a batch together."""
        return self.num_pipelines if self.shared else 1

    @property
    def batches_per_iteration(self) -> int:
        """N, or one that is shared."""
        return self.num_pipelines // self.num_sharers

    def build(self, workload: Workload, num_micro_batches: int) -> _Training:
        """As a user would."""
        block: dict[str, Any] = {
            "num_pipelines": self.num_pipelines,
            "schedule": {"name": self.schedule, "advance": self.advance},
            "trace": None if self.trace is None else f"{self.trace}/{self.key}",
        }
        engine, *_ = avgpipe_ds.initialize(
            model=pipeline_module(workload),
            optimizer=workload.make_optimizer,
            config=deepspeed_config(replace(workload, batch=workload.batch // self.num_sharers), num_micro_batches)
            | {"avgpipe": block},
        )
        return _Training(engine, workload.micro_batches(self.num_sharers * num_micro_batches))

    def problem(self, workload: Workload, num_micro_batches: int) -> str | None:
        """Every pipeline takes the same number of samples, in equal slices."""
        if self.shared and workload.batch % (self.num_sharers * num_micro_batches):
            return (
                f"N = {self.num_pipelines} pipelines can't share a batch of {workload.batch} samples in M = {num_micro_batches}"
                " equal micro-batches each"
            )
        return super().problem(workload, num_micro_batches)

    def fixed(self, num_micro_batches: int) -> int:
        """As fine slices as everyone's: those who share a batch make fewer of them each."""
        return max(1, num_micro_batches // self.num_sharers)

    def compute_s(self, workload: Workload, num_micro_batches: int) -> float:
        """Those who share a batch cut it finer."""
        return super().compute_s(workload, self.num_sharers * num_micro_batches)
