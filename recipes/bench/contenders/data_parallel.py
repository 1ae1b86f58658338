"""DeepSpeed's data parallelism: every accelerator holds the whole model and trains its share of each batch."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import groups
from torch import Tensor, nn

from bench.contenders.base import Contender, Training
from bench.contenders.deepspeed_pipeline import DeepSpeedTraining, deepspeed_config
from bench.layers import mean_squared_error
from bench.workload import Samples, Workload

__all__ = ["DataParallel"]


class _Training(DeepSpeedTraining):
    def __init__(self, engine: Any, data: Iterator[Samples], num_micro_batches: int) -> None:
        super().__init__(engine, data)
        self._num_micro_batches = num_micro_batches

    def train_batch(self) -> Tensor | None:
        losses = []
        for _ in range(self._num_micro_batches):
            inputs, labels = next(self.data)
            loss = mean_squared_error(self.engine(inputs), labels)
            self.engine.backward(loss)  # divides by M
            self.engine.step()  # acts on the last micro-batch only
            losses.append(loss.detach())
        return torch.stack(losses).mean()


@dataclass(frozen=True, kw_only=True)
class DataParallel(Contender):
    """K replicas. M is how many micro-batches a rank makes of its B / K samples.

    Attributes:
        zero_stage: 0 or 1; what is partitioned over the replicas: nothing, or the optimizer.
    """

    zero_stage: int

    def build(self, workload: Workload, num_micro_batches: int) -> Training:
        """A `DeepSpeedEngine` around the whole model."""
        groups.mpu = None  # DeepSpeed keeps the topology of the last pipeline, which says that there are no replicas
        rank, num_replicas = dist.get_rank(), workload.num_stages
        module = nn.Sequential(*(workload.chunk(index) for index in range(workload.num_chunks)))
        config = deepspeed_config(workload, num_micro_batches, num_replicas=num_replicas) | {
            "zero_optimization": {"stage": self.zero_stage},
            "zero_allow_untested_optimizer": True,
        }
        engine, *_ = deepspeed.initialize(
            model=module,
            optimizer=workload.make_optimizer,
            model_parameters=list(module.parameters()),
            config=config,
        )
        data = workload.micro_batches(num_micro_batches, replica=rank, num_replicas=num_replicas)
        return _Training(engine, data, num_micro_batches)

    def problem(self, workload: Workload, num_micro_batches: int) -> str | None:
        """Every replica takes the same number of samples, in equal slices."""
        if workload.batch % (workload.num_stages * num_micro_batches):
            return (
                f"a batch of {workload.batch} samples can't be divided into {num_micro_batches} equal micro-batches on each of "
                f"K = {workload.num_stages} replicas"
            )
        return None

    def candidates(self, workload: Workload) -> list[int]:
        """1, and finer slices, which need less memory."""
        return [number for number in (1, 2, 4) if self.problem(workload, number) is None]

    def fixed(self, num_micro_batches: int) -> int:
        """1: there is no pipeline to fill, and B / K samples at a time are as few as a pipeline's micro-batch with M = K."""
        return 1

    def compute_s(self, workload: Workload, num_micro_batches: int) -> float:
        """The whole model, for the samples of one replica."""
        num_samples = workload.batch / workload.num_stages / num_micro_batches
        return num_micro_batches * workload.num_stages * workload.times.total_s(num_samples)
