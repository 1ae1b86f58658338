"""A `PipelineModule` made of a Hugging Face model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from avgpipe_ds.deepspeed_compat import PartitionedModule
from avgpipe_ds.hf.adapters import Adapters
from avgpipe_ds.hf.layers import Flow, travelling
from avgpipe_ds.hf.plan import LayerPlan, checkpoint_name, cuts_of, first_layer_of, module_prefix
from avgpipe_ds.hf.tasks import Task
from avgpipe_ds.hf.weights import WeightLoader
from avgpipe_ds.partition import balanced_parts

logger = logging.getLogger(__name__)


class HFPipelineModule(PartitionedModule):
    """One stage of a Hugging Face model. Build it with `avgpipe_ds.hf.to_pipeline`; every rank must.

    Attributes:
        hf_config: transformers' config of the whole model.
        task: what the head does.
        adapters: those in the blocks, if any.
        plan: the layers of all stages; `parts[k]` to `parts[k + 1]` are those of stage k.

    """

    def __init__(
        self,
        plan: Sequence[LayerPlan],
        loader: WeightLoader,
        *,
        hf_config: Any,
        task: Task,
        adapters: Adapters | None,
        parameter_counts: Sequence[int],
        num_stages: int,
        loss_fn: Callable[..., Tensor],
        partition_method: str,
        partition: Sequence[int] | None,
        activation_checkpoint_interval: int,
        seed: int,
    ) -> None:
        # Plain attributes, set before nn.Module's constructor: PipelineModule's own calls the overrides below.
        self.plan, self.hf_config, self.task, self.adapters = plan, hf_config, task, adapters
        self._parameter_counts = parameter_counts
        self._loader: WeightLoader | None = loader
        super().__init__(
            layers=[layer.spec for layer in plan],
            num_stages=num_stages,
            loss_fn=loss_fn,
            base_seed=seed,
            partition_method=partition_method,
            partition=partition,
            # DeepSpeed's reentrant default detaches a first stage fed with ids, and would ask for gradients of masks.
            activation_checkpoint_func=partial(checkpoint, use_reentrant=False),
            dynamic_shape=True,
        )
        self.set_checkpoint_interval(activation_checkpoint_interval)
        self._loader = None  # it may keep a whole model or open files alive
        if adapters is not None:
            adapters.source = None

    def forward(self, inputs: Flow) -> Tensor | Flow:
        """Run the stage's layers: logits on the last stage, else what travels to the next one; see `avgpipe_ds.hf.layers`."""
        output: Any = super().forward(inputs)
        return output if isinstance(output, Tensor) else travelling(output)

    def checkpoint_name(self, name: str) -> str:
        """Transformers' name of `name`, a name in `state_dict()`."""
        return checkpoint_name(self.plan, name)

    def owns(self, name: str) -> bool:
        """Whether `name`, a name in `state_dict()`, is the one by which transformers saves the tensor: tied ones have several."""
        layer = self.plan[first_layer_of(self.plan, name)]
        return self.checkpoint_name(name) in layer.tensors

    def first_stage_of(self, name: str) -> int:
        """The stage that speaks for `name`, a name in `state_dict()`: a tied module lives on several."""
        stage: int = self.stage_owner(first_layer_of(self.plan, name))
        return stage

    def _partition_layers(self, method: str = "compute") -> None:
        """Balance arithmetic ("compute") or memory ("parameters") from shapes; other methods are DeepSpeed's."""
        if self._partition is not None or method not in ("compute", "parameters"):
            super()._partition_layers(method=method)
        else:
            skip_lookups = method == "compute"
            costs = [
                0 if layer.is_lookup and skip_lookups else count
                for layer, count in zip(self.plan, self._parameter_counts, strict=True)
            ]
            cuts = cuts_of(self.plan)
            runs = [sum(costs[start:stop]) for start, stop in pairwise(cuts)]
            self.parts = [cuts[place] for place in balanced_parts(runs, self.num_stages)]
        self.parts = self._at_cuts(self.parts)
        stage_id = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(start=self.parts[stage_id], stop=self.parts[stage_id + 1])
        if self.global_rank == 0:
            stages = [f"{start}-{stop - 1}" for start, stop in pairwise(self.parts)]
            logger.info("layers of the %d stages, balanced by %s: %s", self.num_stages, method, ", ".join(stages))

    def _at_cuts(self, parts: Sequence[int]) -> list[int]:
        """The boundaries, with those between layers that belong together moved to the next place where a stage may begin.

        Raises:
            ValueError: a stage has nothing left.

        """
        inner = cuts_of(self.plan)[1:-1]
        moved = [min(inner, key=lambda cut: abs(cut - part)) if inner else part for part in parts[1:-1]]
        moved = [parts[0], *moved, parts[-1]]
        if any(start >= stop for start, stop in pairwise(moved)):
            raise ValueError(f"stages with the boundaries {list(parts)} can't be built: expected them among {inner}")
        if moved != list(parts) and self.global_rank == 0:
            logger.warning("stages begin at %s and not at %s: some layers belong together", moved, list(parts))
        return moved

    def _build(self) -> None:
        """Build this stage's layers empty and fill them, on the CPU, before DeepSpeed moves them."""
        super()._build()
        assert self._loader is not None
        modules = dict(self.named_modules())
        filled: set[str] = set()
        for index in range(self._local_start, self._local_stop):
            name = module_prefix(self.plan, index).removesuffix(".")
            if name not in filled:  # with one stage, a tied module comes up twice
                self._loader.fill(index, modules[name])
                filled.add(name)
        logger.debug("stage read %d tensors, %d bytes", self._loader.num_tensors_read, self._loader.num_bytes_read)
