"""torch.distributed.pipelining: its schedules, with an optimizer step as a training loop of torch writes it."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleDualPipeV

from avgpipe_ds.memory.breakdown import Breakdown
from avgpipe_ds.memory.tensors import bytes_of, optimizer_tensors
from bench.contenders.base import Contender, Training
from bench.layers import mean_squared_error
from bench.workload import Workload

__all__ = ["Placement", "TorchPipelining", "stages_of"]

Placement = Literal["pairs", "loop", "v"]
"""Which stages a rank holds: see `stages_of`."""


def stages_of(placement: Placement, rank: int, num_ranks: int) -> dict[int, list[int]]:
    """The stages of a rank, each with the chunks that make it up.

    "pairs" is one stage of two chunks; "loop" gives rank r the stages r and r + K; "v" the stages r and 2 K - 1 - r.
    """
    if placement == "pairs":
        return {rank: [2 * rank, 2 * rank + 1]}
    second = rank + num_ranks if placement == "loop" else 2 * num_ranks - 1 - rank
    return {rank: [rank], second: [second]}


class _OwnCopy(nn.Module):
    """Copies the input of the first stage, as DeepSpeed does with every micro-batch that it loads.

    Torch's schedules slice the batch into views. What autograd keeps of a view is the whole batch, which would be counted here.
    """

    def forward(self, x: Tensor) -> Tensor:
        return x.clone()


class _Training(Training):
    def __init__(self, workload: Workload, schedule: Any, stages: dict[int, nn.ModuleDict], num_stages: int) -> None:
        self._schedule, self._stages = schedule, stages
        self._first, self._last = 0 in stages, num_stages - 1 in stages
        self._clipping = workload.clipping
        self._optimizer = workload.make_optimizer(self.parameters())
        self._data = workload.batches()

    def train_batch(self) -> Tensor | None:
        inputs, labels = next(self._data)
        losses: list[Tensor] = []
        # The schedule divides gradients by M (`scale_grads`, the default), so they are those of the mean over the batch.
        self._schedule.step(
            *((inputs,) if self._first else ()), target=labels if self._last else None, losses=losses, return_outputs=False
        )
        if self._clipping:
            self._clip()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return torch.stack(losses).mean().detach() if losses else None

    def _clip(self) -> None:
        """By the norm over all stages: the squared norms of the ranks are added up, as torchtitan does it."""
        parameters = list(self.parameters())
        gradients = [p.grad for p in parameters if p.grad is not None]
        squared = torch.nn.utils.get_total_norm(gradients).square()
        dist.all_reduce(squared)
        torch.nn.utils.clip_grads_with_norm_(parameters, self._clipping, squared.sqrt())

    def parameters(self) -> Iterable[nn.Parameter]:
        return [parameter for stage in self._stages.values() for parameter in stage.parameters()]

    def weights(self) -> dict[str, Tensor]:
        named = [pair for stage in self._stages.values() for pair in stage.named_parameters()]
        return {name: weight.detach().clone() for name, weight in named}

    def memory(self) -> Breakdown:
        parameters = list(self.parameters())
        return Breakdown(
            weights=bytes_of(parameters),
            gradients=sum(p.numel() * p.element_size() for p in parameters),
            optimizer=bytes_of(optimizer_tensors(self._optimizer)),
        )

    def close(self) -> None:
        """Nothing: it uses the default process group."""


@dataclass(frozen=True, kw_only=True)
class TorchPipelining(Contender):
    """One of torch's schedules.

    Attributes:
        schedule: its class.
        placement: which stages a rank holds.
    """

    schedule: type[Any]
    placement: Placement

    def build(self, workload: Workload, num_micro_batches: int) -> Training:
        """Chunks become stages; torch finds out the shapes in the first step."""
        num_stages = workload.num_stages if self.placement == "pairs" else workload.num_chunks
        chunks = stages_of(self.placement, dist.get_rank(), workload.num_stages)
        modules = {stage: nn.ModuleDict({str(index): workload.chunk(index) for index in of}) for stage, of in chunks.items()}
        stages = []
        for stage, module in modules.items():
            layers = [_OwnCopy(), *module.values()] if stage == 0 else list(module.values())
            stages.append(PipelineStage(nn.Sequential(*layers), stage, num_stages, torch.device("cpu")))
        schedule = self.schedule(
            stages[0] if self.placement == "pairs" else stages,  # schedules of one stage per rank take it by itself
            n_microbatches=num_micro_batches,
            loss_fn=mean_squared_error,
        )
        return _Training(workload, schedule, modules, num_stages)

    def problem(self, workload: Workload, num_micro_batches: int) -> str | None:
        """What torch's schedules check in their constructors."""
        name, num_ranks = self.schedule.__name__, workload.num_stages
        rounds = max(1, num_micro_batches // num_ranks)
        if self.placement == "loop" and num_micro_batches % rounds:
            return f"{name} trains in rounds of K micro-batches or more: {rounds} rounds don't divide M = {num_micro_batches}"
        if self.schedule is Schedule1F1B and num_micro_batches < num_ranks:
            return f"{name} needs M of at least K = {num_ranks}, got {num_micro_batches}"
        if self.schedule is ScheduleDualPipeV and num_micro_batches < 2 * num_ranks:
            return f"{name} needs M of at least 2 K = {2 * num_ranks}, got {num_micro_batches}"
        return super().problem(workload, num_micro_batches)
