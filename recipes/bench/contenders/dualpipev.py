"""DeepSpeed's DualPipeV: every accelerator holds two stages, and micro-batches go down one way and come back the other."""

from typing import Any

from deepspeed.pipe import DualPipeVModule

from bench.contenders.deepspeed_pipeline import DeepSpeedPipeline
from bench.workload import Workload

__all__ = ["DualPipeV"]


class DualPipeV(DeepSpeedPipeline):
    """Unlike DeepSeek's paper, and torch's schedule of this name, DeepSpeed does not put off the gradients of the weights."""

    module_class: type[Any] = DualPipeVModule

    def problem(self, workload: Workload, num_micro_batches: int) -> str | None:
        """The schedule has no shorter form."""
        if num_micro_batches < 2 * workload.num_stages:
            return f"DualPipeV needs M of at least 2 K = {2 * workload.num_stages}, got {num_micro_batches}"
        return super().problem(workload, num_micro_batches)
