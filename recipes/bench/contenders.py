"""The engines that are compared, all on the same model and data."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import Tensor

import avgpipe_ds
from bench.layers import EmulatedStage, TransformerStage, squared_mean

__all__ = ["Contender", "Workload", "contenders"]


@dataclass(frozen=True)
class Workload:
    """What every contender trains.

    Attributes:
        mode: "emulated" or "real".
        num_stages, num_micro_batches: K and M.
        shape: of one micro-batch, (batch, length, width).
        forward_s, backward_s: emulated seconds per micro-batch and stage.
        layers_per_stage: transformer layers, in real mode.
        clipping: gradient clipping, 0 for none.
    """

    mode: str
    num_stages: int
    num_micro_batches: int
    shape: tuple[int, int, int]
    forward_s: float
    backward_s: float
    layers_per_stage: int
    clipping: float

    def module(self) -> PipelineModule:
        """The model; every rank builds it."""
        torch.manual_seed(0)
        if self.mode == "emulated":
            spec = LayerSpec(EmulatedStage, self.shape[-1], self.forward_s, self.backward_s)
        else:
            spec = LayerSpec(TransformerStage, self.shape[-1], self.layers_per_stage)
        specs = [spec] * self.num_stages
        return PipelineModule(specs, num_stages=self.num_stages, loss_fn=squared_mean, partition_method="uniform")

    def config(self) -> dict[str, Any]:
        """DeepSpeed's configuration."""
        return {
            "train_micro_batch_size_per_gpu": self.shape[0],
            "gradient_accumulation_steps": self.num_micro_batches,
            "gradient_clipping": self.clipping,
            "steps_per_print": 10**9,
        }

    def data(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Endless micro-batches, made once."""
        x = torch.randn(self.shape)
        while True:
            yield x, x


@dataclass(frozen=True)
class Contender:
    """A row of the table.

    Attributes:
        name: what the table calls it.
        block: the "avgpipe" block; None for DeepSpeed's own engine.
    """

    name: str
    block: dict[str, Any] | None

    @property
    def num_pipelines(self) -> int:
        """N."""
        return 1 if self.block is None else int(self.block["num_pipelines"])

    def engine(self, workload: Workload) -> Any:
        """Build it; every rank does so."""
        module, config = workload.module(), workload.config()
        arguments = {"model": module, "optimizer": lambda parameters: torch.optim.Adam(parameters, lr=1e-4)}
        if self.block is None:
            return deepspeed.initialize(**arguments, model_parameters=list(module.parameters()), config=config)[0]
        return avgpipe_ds.initialize(**arguments, config=config | {"avgpipe": self.block})[0]


def contenders(pipelines: list[int], advance: int) -> list[Contender]:
    """DeepSpeed; one pipeline with 1F1B and with advance forward; N pipelines for each other N."""
    rows = [Contender("DeepSpeed PipelineEngine", None)]
    for number in pipelines:
        rows.append(Contender(f"N = {number}, 1F1B", {"num_pipelines": number}))
        if number == 1:
            schedule = {"name": "advance_forward", "advance": advance}
            rows.append(Contender(f"N = 1, advance {advance}", {"num_pipelines": 1, "schedule": schedule}))
    return rows
