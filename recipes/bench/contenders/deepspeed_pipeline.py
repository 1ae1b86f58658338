"""DeepSpeed's own pipelines: `PipelineEngine`, whose 1F1B everyone is compared with, and what other users of DeepSpeed share."""

from collections.abc import Iterable, Iterator
from typing import Any

import deepspeed
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import Tensor, nn

from avgpipe_ds.memory.breakdown import Breakdown
from avgpipe_ds.memory.tensors import bytes_of, optimizer_tensors
from bench.contenders.base import Contender, Training
from bench.layers import mean_squared_error
from bench.workload import Samples, Workload

__all__ = ["DeepSpeedPipeline", "DeepSpeedTraining", "deepspeed_config", "pipeline_module"]


def deepspeed_config(workload: Workload, num_micro_batches: int, *, num_replicas: int = 1) -> dict[str, Any]:
    """DeepSpeed's configuration of a workload."""
    return {
        "train_micro_batch_size_per_gpu": workload.batch // num_micro_batches // num_replicas,
        "gradient_accumulation_steps": num_micro_batches,
        "gradient_clipping": workload.clipping,
        "steps_per_print": 10**9,
    }


def pipeline_module(workload: Workload, cls: type[Any] = PipelineModule) -> Any:
    """The model as DeepSpeed takes it, cut into equal stages; every rank builds its own part only."""
    plans = [workload.plan_of_chunk(index) for index in range(workload.num_chunks)]
    specs = [LayerSpec(kind, **arguments) for kind, arguments in plans]
    return cls(specs, num_stages=workload.num_stages, loss_fn=mean_squared_error, partition_method="uniform")


class DeepSpeedTraining(Training):
    """A DeepSpeed engine that has a `train_batch`.

    Args:
        engine: as `deepspeed.initialize` makes it.
        data: micro-batches.

    Attributes:
        engine, data: as given.
    """

    def __init__(self, engine: Any, data: Iterator[Samples]) -> None:
        self.engine = engine
        self.data = data

    def train_batch(self) -> Tensor | None:
        """DeepSpeed tells all ranks the loss."""
        loss: Tensor = self.engine.train_batch(self.data)
        return loss

    def parameters(self) -> Iterable[nn.Parameter]:
        """Those of the engine's module."""
        parameters: Iterable[nn.Parameter] = self.engine.module.parameters()
        return parameters

    def weights(self) -> dict[str, Tensor]:
        """Layers are named by their place in the whole model, so the names are as they should be."""
        return {name: weight.detach().clone() for name, weight in self.engine.module.named_parameters()}

    def memory(self) -> Breakdown:
        """Master weights are the parameters themselves, or, with ZeRO-1, partitions of their own."""
        optimizer = self.engine.basic_optimizer
        masters = [weight for group in optimizer.param_groups for weight in group["params"]]
        parameters = list(self.parameters())
        return Breakdown(
            weights=bytes_of([*parameters, *masters]),
            gradients=sum(p.numel() * p.element_size() for p in parameters),
            optimizer=bytes_of(optimizer_tensors(optimizer)),
        )

    def close(self) -> None:
        """Undo what DeepSpeed has registered."""
        self.engine.destroy()


class _PipelineTraining(DeepSpeedTraining):
    def close(self) -> None:
        super().close()
        # DualPipeV keeps outputs of the last batch, whose graphs have hooks that refer to the engine. Python's collector can't
        # look into graphs, so the engine and its process groups would stay.
        self.engine.pipe_buffers.clear()
        self.engine.loss = self.engine.total_loss = self.engine.grad_layer = None


class DeepSpeedPipeline(Contender):
    """DeepSpeed's `PipelineEngine`: 1F1B with blocking messages."""

    module_class: type[Any] = PipelineModule

    def build(self, workload: Workload, num_micro_batches: int) -> Training:
        """`deepspeed.initialize` chooses the engine by the class of the module."""
        module = pipeline_module(workload, self.module_class)
        for parameter in module.parameters():
            # DeepSpeed's fp32 clipping takes pipeline stages for tensor-parallel copies of one model, and counts the gradients of
            # the first stage only. Parameters that are marked so count on every rank, which makes it the norm of the whole model.
            parameter.model_parallel = True
        engine, *_ = deepspeed.initialize(
            model=module,
            optimizer=workload.make_optimizer,
            model_parameters=list(module.parameters()),
            config=deepspeed_config(workload, num_micro_batches),
        )
        return _PipelineTraining(engine, workload.micro_batches(num_micro_batches))
