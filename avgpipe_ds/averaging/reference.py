"""This stage's shard of the reference model, and the hooks that tie it to the optimizers of N pipelines.

The hooks sit on the base optimizer, so they see the fp32 master weights whatever DeepSpeed wraps around them, before DeepSpeed
copies them to the weights that the model computes with. Any torch optimizer works.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from avgpipe_ds import deepspeed_compat as compat
from avgpipe_ds.averaging.rules import AveragingRule
from avgpipe_ds.tracing.recorder import Recorder
from avgpipe_ds.tracing.spans import AVERAGING

__all__ = ["Reference", "swapped"]


class Reference:
    """The shard z of this stage, in the layout of the master weights.

    Args:
        rule: not yet initialized.
        engines: of all N pipelines, in order, with equal weights.
        recorder: told how long the averaging inside the optimizers' steps takes.

    """

    def __init__(self, rule: AveragingRule, engines: Sequence[compat.StageEngine], recorder: Recorder) -> None:
        self.rule = rule
        self._engines = engines
        self._recorder = recorder
        rule.initialize(compat.masters_of(engines[0]))
        for pipeline_id, engine in enumerate(engines):
            self._attach(pipeline_id, engine)

    def _attach(self, pipeline_id: int, engine: compat.StageEngine) -> None:
        # DeepSpeed steps ZeRO's parameter groups one by one, with only that group in `param_groups`.
        places = {id(weight): place for place, weight in enumerate(compat.masters_of(engine))}

        def average(optimizer: torch.optim.Optimizer, update: Callable[[list[Tensor], list[int]], None]) -> None:
            with self._recorder.span(AVERAGING, pipeline_id=pipeline_id):
                weights = [weight for group in compat.trained_weights(optimizer) for weight in group]
                update(weights, [places[id(weight)] for weight in weights])

        base = engine.basic_optimizer
        base.register_step_pre_hook(lambda optimizer, args, kwargs: average(optimizer, self.rule.before_step))
        base.register_step_post_hook(lambda optimizer, args, kwargs: average(optimizer, self.rule.after_step))

    def stepped(self, pipeline_id: int) -> None:
        """A pipeline has taken its step, or skipped it (fp16 overflow), which counts as a zero update."""
        engine = self._engines[pipeline_id]
        with self._recorder.span(AVERAGING, pipeline_id=pipeline_id):
            if not engine.was_step_applied():
                weights = compat.masters_of(engine)
                places = range(len(weights))
                self.rule.before_step(weights, places)
                self.rule.after_step(weights, places)
                compat.publish_masters(engine)
            if pipeline_id == len(self._engines) - 1:
                self.rule.finish_iteration()

    def parameters(self) -> dict[Tensor, Tensor]:
        """Z by parameter of pipeline 0's module, fp32; views, not copies. Collective over the data-parallel group if masters
        are partitioned.
        """
        values: dict[Tensor, Tensor] = {}
        place = 0
        for group in compat.master_groups(self._engines[0]):
            shard = self.rule.reference[place : place + len(group.masters)]
            values.update(zip(group.params, group.whole(shard), strict=True))
            place += len(group.masters)
        return values

    def masters(self) -> dict[Tensor, Tensor]:
        """Z by master weight of pipeline 0's optimizer."""
        return dict(zip(compat.masters_of(self._engines[0]), self.rule.reference, strict=True))


@contextmanager
def swapped(values: dict[Tensor, Tensor]) -> Iterator[None]:
    """Let each key have the storage of its value inside the block.

    Autograd graphs that wait for their backward hold the key's old storage or the key itself; both are as before when the block
    ends, and no version counter moves.
    """
    outside = {target: target.data for target in values}
    for target, value in values.items():
        target.data = value.to(target.dtype)
    try:
        yield
    finally:
        for target, data in outside.items():
            target.data = data
