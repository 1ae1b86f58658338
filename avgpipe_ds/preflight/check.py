"""The check before training: one micro-batch through the real stages, and what it tells."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from avgpipe_ds import deepspeed_compat as compat
from avgpipe_ds.data_feed import prepare_micro_batch
from avgpipe_ds.execution.mailbox import Mailbox
from avgpipe_ds.execution.rendezvous import Rendezvous
from avgpipe_ds.preflight.guard import untouched
from avgpipe_ds.preflight.neighbours import Neighbours
from avgpipe_ds.preflight.report import Comparison, LayerRow, Problem, Report
from avgpipe_ds.preflight.stage_check import StageCheck, Subject
from avgpipe_ds.preflight.unsplit import compare_at_home, send_stage_home
from avgpipe_ds.transport.gloo import GlooTransport

__all__ = ["check", "preflight"]

logger = logging.getLogger(__name__)

_TIED = "tied_modules."
"""What the names of weights begin with that may be on several stages, as the gradients of their parts are."""


def preflight(module: compat.PipelineModule, micro_batch: Any, *, loss_fn: Any = None) -> Report:
    """Send one micro-batch through the stages and back, and report what would break later. Every rank calls it.

    Weights, buffers, gradients and random numbers are afterwards as before. A Hugging Face model (`avgpipe_ds.hf`) is also
    compared with transformers' own, for which the first stage holds all of it for a moment.

    Args:
        module: of this rank's stage, with or without an engine around it.
        micro_batch: `(inputs, labels)`, each a tensor or a tuple of tensors; inputs are needed on the first stage, labels on
            the last, and between them it may be None.
        loss_fn: of (outputs, labels); by default the module's.

    Returns:
        The same on every rank. What is wrong with the model or the micro-batch is in it, and not raised.

    Raises:
        PeerLost, RemoteError: a rank died, or failed outside of the model.

    """
    stage_id, _, ranks = compat.place_of(module)
    device = next((weight.device for weight in module.parameters()), torch.device("cpu"))
    is_first, is_last = stage_id == 0, stage_id == len(ranks[0]) - 1
    inputs, labels, problem = None, None, None
    if is_first or is_last:
        try:
            inputs, labels = prepare_micro_batch(micro_batch, device, first_stage=is_first, last_stage=is_last)
        except ValueError as error:
            problem = Problem(severity="error", where="data", text=str(error))
    subject = Subject(
        module=module,
        forward=module,
        loss_fn=loss_fn or module.loss_fn,
        device=device,
        inputs=inputs,
        labels=labels,
        exact=all(weight.dtype == torch.float32 for weight in module.parameters()),
    )
    return check(subject, problem)


def check(subject: Subject, problem: Problem | None = None) -> Report:
    """`preflight` of what was prepared. Every rank calls it.

    Args:
        subject: on this rank.
        problem: that was found on this rank before.

    """
    stage_id, replica, ranks = compat.place_of(subject.module)
    stage_of = {rank: stage for row in ranks for stage, rank in enumerate(row)}
    mailbox = Mailbox(GlooTransport(torch.device("cpu")), lambda rank: f"rank {rank} (stage {stage_of[rank]})")
    neighbours = Neighbours(mailbox, ranks[replica], stage_id, subject.device)
    world = tuple(sorted(stage_of))
    try:
        return _checked(subject, neighbours, Rendezvous(mailbox), world, replica, [] if problem is None else [problem])
    except BaseException as error:
        mailbox.abort(error)
        raise
    finally:
        mailbox.close("its check before training ended")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """What one rank knows.

    Attributes:
        replica: of its pipeline.
        rows, problems: of its stage.
        loss: on the last stage.
        squared_norm: on the first stage, that of all stages; None if not all are through.

    """

    replica: int
    rows: tuple[LayerRow, ...]
    problems: tuple[Problem, ...]
    loss: float | None = None
    squared_norm: float | None = None


def _checked(
    subject: Subject,
    neighbours: Neighbours,
    rendezvous: Rendezvous,
    world: tuple[int, ...],
    replica: int,
    problems: Sequence[Problem],
) -> Report:
    parts = rendezvous.gather(("checked",), world, _pass(subject, neighbours, replica, problems, training=True))
    report = _merged(parts)
    why_not = _why_not_comparable(subject, report)
    if why_not:
        return replace(report, note=why_not)
    compared: tuple[Comparison | None, str] = (None, "")
    if replica == 0:
        compared = _compare(subject, neighbours)
    found = rendezvous.gather(("compared",), world, compared)
    comparison = next((one for one, _ in found if one is not None), None)
    note = next((text for _, text in found if text), "")
    if comparison is None or comparison.same:
        return replace(report, comparison=comparison, note=note)
    text = (
        "the pipeline does not compute what transformers' own model does: loss and gradient norm are"
        f" {comparison.loss_difference:.1e} and {comparison.norm_difference:.1e} apart, expected at most {comparison.tolerance}"
    )
    problem = Problem(severity="error", where="comparison", text=text)
    return replace(report, comparison=comparison, problems=(*report.errors, problem, *report.warnings))


def _pass(subject: Subject, neighbours: Neighbours, replica: int, problems: Sequence[Problem], *, training: bool) -> _Part:
    """One micro-batch through all stages of this replica."""
    stage = StageCheck(subject, neighbours)
    with untouched(subject.module, subject.device, training=training):
        stage.run()
    return _Part(
        replica=replica,
        rows=tuple(stage.observer.rows),
        problems=(*problems, *stage.observer.problems),
        loss=stage.loss,
        squared_norm=_squared_norm(stage.gradients, neighbours),
    )


def _squared_norm(gradients: dict[str, Tensor | None] | None, neighbours: Neighbours) -> float | None:
    """On the first stage, the squared norm of all stages' gradients; those of a tied weight are added up before."""
    mine: float | None = None
    tied: dict[str, Tensor] = {}
    if gradients is not None:
        present = {name: gradient.detach() for name, gradient in gradients.items() if gradient is not None}
        tied = {name: gradient for name, gradient in present.items() if name.startswith(_TIED)}
        mine = sum((float(g.double().square().sum()) for name, g in present.items() if name not in tied), 0.0)
    if not neighbours.is_first:
        neighbours.send_home("norm", (mine, list(tied)), list(tied.values()))
        return None
    total, sums = mine, {name: gradient.double().cpu() for name, gradient in tied.items()}
    for message in neighbours.from_others("norm"):
        theirs, names = message.payload
        total = None if total is None or theirs is None else total + theirs
        for name, gradient in zip(names, message.tensors, strict=True):
            sums[name] = sums.get(name, torch.zeros(())) + gradient.double()
    return None if total is None else total + sum(float(gradient.square().sum()) for gradient in sums.values())


def _merged(parts: Sequence[_Part]) -> Report:
    """One report of all ranks'."""
    first = sorted((row for part in parts if part.replica == 0 for row in part.rows), key=lambda row: row.number)
    problems = list(dict.fromkeys(problem for part in parts for problem in part.problems))
    square = next((part.squared_norm for part in parts if part.replica == 0 and part.squared_norm is not None), None)
    return Report(
        rows=tuple(first),
        problems=tuple(sorted(problems, key=lambda problem: problem.severity != "error")),
        loss=next((part.loss for part in parts if part.replica == 0 and part.loss is not None), None),
        gradient_norm=None if square is None else math.sqrt(square),
    )


def _why_not_comparable(subject: Subject, report: Report) -> str:
    """The same on every rank."""
    if not hasattr(subject.module, "checkpoint_name"):
        return "there is none for a plain PipelineModule"
    if report.errors or report.gradient_norm is None:
        return "the pipeline could not compute"
    return ""


def _compare(subject: Subject, neighbours: Neighbours) -> tuple[Comparison | None, str]:
    """On the first stage the comparison, or why there is none."""
    part = _pass(subject, neighbours, 0, [], training=False)
    if not neighbours.is_first:
        send_stage_home(subject, neighbours)
        if neighbours.is_last:
            neighbours.send_home("loss", part.loss)
        return None, ""
    loss = part.loss if neighbours.is_last else neighbours.from_stage(neighbours.last_stage, "loss").payload
    if loss is None or part.squared_norm is None:
        return None, "without dropout, the pipeline could not compute"
    logger.info("comparing with transformers' own model")
    try:
        return compare_at_home(subject, neighbours, loss=loss, norm=math.sqrt(part.squared_norm)), ""
    except Exception as error:  # noqa: BLE001 - the pipeline itself is fine
        return None, f"{type(error).__name__}: {error}"
