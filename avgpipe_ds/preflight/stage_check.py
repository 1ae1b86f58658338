"""One micro-batch through a stage and back, as in training, with a look at everything on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from avgpipe_ds import deepspeed_compat as compat
from avgpipe_ds.execution.tensors import as_tuple, check_stage_output
from avgpipe_ds.preflight.data import attended_padding
from avgpipe_ds.preflight.loss import checked_loss
from avgpipe_ds.preflight.neighbours import Flow, Neighbours
from avgpipe_ds.preflight.observe import Observer, is_finite
from avgpipe_ds.tuning.sample import Sample, needs_gradient

__all__ = ["StageCheck", "Subject"]

_SHOWN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is checked on a stage.

    Attributes:
        module: of the stage.
        forward: of the module, in the precision of the training.
        loss_fn: of (outputs, labels); None: the last layer returns the loss.
        device: where it computes.
        inputs, labels: a micro-batch, on the first and on the last stage.
        exact: whether it computes in fp32, so that a comparison is worth an error.

    """

    module: compat.PipelineModule
    forward: Callable[[Any], Any]
    loss_fn: Callable[[Any, Any], Any] | None
    device: torch.device
    inputs: Any = None
    labels: Any = None
    exact: bool = True


class StageCheck:
    """A pass of one micro-batch through this stage. All stages of a replica make theirs at the same time.

    Attributes:
        observer: what it noted down.
        loss: on the last stage, once it is there.
        gradients: by the name of a parameter in the module, once the backward is through; None for those that got none.

    """

    def __init__(self, subject: Subject, neighbours: Neighbours) -> None:
        self._subject, self._neighbours = subject, neighbours
        self.observer = Observer(subject.module, subject.device)
        self.loss: float | None = None
        self.gradients: dict[str, Tensor | None] | None = None
        self._stage = f"stage {subject.module.stage_id}"
        self._leaves: list[Tensor] = []

    def run(self) -> None:
        """Forward and backward. Whatever goes wrong in the model is a problem in the report, and the other stages hear of it."""
        neighbours = self._neighbours
        self._look_at_weights()
        flow = self._first_flow() if neighbours.is_first else neighbours.receive_down()
        outputs = None if flow is None else self._forward(flow)
        if not neighbours.is_last:
            neighbours.send_down(None if outputs is None or flow is None else self._to_next(flow, outputs))
        if flow is None:
            return
        gradients: Sequence[Tensor] | None = None
        if outputs is not None:
            gradients = [torch.ones_like(outputs)] if neighbours.is_last else neighbours.receive_up()
        sent = None if outputs is None or gradients is None else self._backward(outputs, gradients)
        if not neighbours.is_first:
            neighbours.send_up(sent)

    def _look_at_weights(self) -> None:
        """What needs no micro-batch."""
        observer = self.observer
        for number, function in compat.layers_of(self._subject.module):
            bad = [weight for weight in compat.weights_of(function) if not bool(torch.isfinite(weight).all())]
            if bad:
                text = f"{self._listed(bad)} not finite: were they loaded and initialised?"
                observer.report("error", text, where=observer.place(number, function))
        if not self._trainable():
            observer.report(
                "warning",
                "nothing to train: it only passes gradients on (plain DeepSpeed would refuse it). If that is not meant, look at"
                " requires_grad",
                where=self._stage,
            )

    def _first_flow(self) -> Flow | None:
        inputs = self._subject.inputs
        if inputs is None:
            return None
        config = getattr(self._subject.module, "hf_config", None)
        problem = None if config is None else attended_padding(inputs, config)
        if problem is not None:
            self.observer.report("warning", problem, where="data")
        first = next(iter(as_tuple(inputs)), None)
        return Flow(values=inputs, samples=None if first is None or not first.dim() else len(first))

    def _forward(self, flow: Flow) -> Any:
        """Outputs, on the last stage the loss; None if there are none to go on with."""
        observer, subject = self.observer, self._subject
        inputs, self._leaves = Sample.of(flow.values, None).leaves()
        try:
            with observer.watching(flow.samples):
                outputs = subject.forward(inputs)
            if self._neighbours.is_last:
                loss = checked_loss(outputs, subject.labels, subject.loss_fn, observer, subject.device)
                self.loss = None if loss is None else float(loss.detach())
                return loss
            observer.where = self._stage
            check_stage_output(outputs, subject.module.stage_id)
        except Exception as error:  # noqa: BLE001 - whatever a model raises belongs into the report
            observer.report("error", f"{type(error).__name__}: {error}")
            return None
        return outputs

    def _to_next(self, flow: Flow, outputs: Any) -> Flow:
        trains = flow.trains_above or bool(self._trainable())
        if trains and any(map(needs_gradient, as_tuple(outputs))):
            for position, value in enumerate(as_tuple(outputs)):
                if value.is_floating_point() and not value.requires_grad:
                    self.observer.report(
                        "warning",
                        f"a float tensor {tuple(value.shape)}, output {position}, travels without gradient (plain DeepSpeed would"
                        " hang on it). If it is a mask or a table, integers or a buffer on each stage are cheaper; else look for"
                        " a detach()",
                        where=f"{self._stage}, to the next one",
                    )
        return Flow(values=outputs, samples=self.observer.samples, trains_above=trains)

    def _backward(self, outputs: Any, gradients: Sequence[Tensor]) -> list[Tensor] | None:
        """The gradients that the stage before gets; None if there are none."""
        weights = list(self._trainable().values())
        wanted = [*self._leaves, *weights]
        sources = [tensor for tensor in as_tuple(outputs) if tensor.requires_grad]
        found: Sequence[Tensor | None] = [None] * len(wanted)
        if sources and wanted:
            try:
                found = torch.autograd.grad(sources, wanted, list(gradients), allow_unused=True)
            except Exception as error:  # noqa: BLE001 - as in the forward
                self.observer.report("error", f"the backward raised {type(error).__name__}: {error}", where=self._stage)
                return None
        own = found[len(self._leaves) :]
        self.gradients = dict(zip(self._trainable(), own, strict=True))
        came_finite = all(map(is_finite, gradients))
        self._look_at_gradients({id(weight): gradient for weight, gradient in zip(weights, own, strict=True)}, came_finite)
        return [
            torch.zeros_like(leaf) if gradient is None else gradient
            for leaf, gradient in zip(self._leaves, found[: len(self._leaves)], strict=True)
        ]

    def _look_at_gradients(self, gradients: dict[int, Tensor | None], came_finite: bool) -> None:
        """By the identity of the parameter. What follows from another problem is not reported."""
        observer = self.observer
        if any(problem.severity == "error" for problem in observer.problems):
            return
        if gradients and all(gradient is None for gradient in gradients.values()):
            observer.report("error", "no parameter of it gets a gradient: nothing learns here", where=self._stage)
            return
        sound = came_finite
        for number, function in reversed(compat.layers_of(self._subject.module)):
            weights = [weight for weight in compat.weights_of(function) if id(weight) in gradients]
            unused = [weight for weight in weights if gradients[id(weight)] is None]
            bad = [weight for weight in weights if not is_finite(gradients[id(weight)])]
            where = observer.place(number, function)
            if unused:
                observer.report("warning", f"{self._listed(unused)} given no gradient: does forward() use them?", where=where)
            if bad and sound:
                observer.report("error", f"in backward, {self._listed(bad)} given a gradient that is not finite", where=where)
                sound = False

    def _trainable(self) -> dict[str, Tensor]:
        """By their names in the module."""
        named = self._subject.module.named_parameters()
        return {name: weight for name, weight in named if weight.requires_grad and name != compat.PLACEHOLDER}

    def _listed(self, weights: Sequence[Tensor]) -> str:
        """Some names and the verb: "a, b are"."""
        names = [self.observer.names.parameter(weight) for weight in weights]
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        return f"{', '.join(names[:_SHOWN])}{more} {'is' if len(names) == 1 else 'are'}"
