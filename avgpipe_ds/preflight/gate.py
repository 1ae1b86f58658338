"""`"preflight"` in the configuration: an engine checks its own model with the script's first micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from avgpipe_ds import deepspeed_compat as compat
from avgpipe_ds.announce import announce
from avgpipe_ds.data_feed import MicroBatch
from avgpipe_ds.errors import AgreedError
from avgpipe_ds.execution.stage import Stage
from avgpipe_ds.preflight.check import check
from avgpipe_ds.preflight.report import PreflightError, Report
from avgpipe_ds.preflight.stage_check import Subject
from avgpipe_ds.preflight.table import as_text

__all__ = ["check_engine", "tell"]


def check_engine(engine: compat.StageEngine, stage: Stage, items: Sequence[MicroBatch]) -> Report | None:
    """Check the engine's model. Every rank calls it, with nothing under way.

    Args:
        engine: of the first pipeline; the others begin with the same weights.
        stage: of this rank.
        items: the micro-batches of the first iteration, of which one is used and none is taken.

    Returns:
        The same on every rank; None if a rank that takes data has none, which the training will say.

    """
    has_data = bool(items) or not stage.topology.takes_data
    if not all(stage.rendezvous.gather(("data to check",), stage.topology.world_ranks, has_data)):
        return None
    if stage.topology.rank == stage.topology.world_ranks[0]:
        announce("checking one micro-batch before training")
    inputs, labels = items[0] if items else (None, None)
    with compat.autocast(engine):
        full_precision = not torch.is_autocast_enabled(stage.device.type)
    subject = Subject(
        module=engine.module,
        forward=partial(compat.forward_alone, engine),
        loss_fn=engine.module.loss_fn,
        device=stage.device,
        inputs=inputs,
        labels=labels,
        exact=full_precision and all(weight.dtype == torch.float32 for weight in engine.module.parameters()),
    )
    return check(subject)


def tell(report: Report, stage: Stage, file: str | None) -> None:
    """Write the report, or log it and let only a sound model pass. Every rank calls it.

    Args:
        report: the same on every rank.
        stage: of this rank.
        file: to be written by the first rank, as `avgpipe-check` wants it; None to go on with training.

    Raises:
        AgreedError: with a `PreflightError`, if there are errors and no file; with what went wrong in writing it.

    """
    topology, problem = stage.topology, None
    if topology.rank == topology.world_ranks[0]:
        try:
            if file is None:
                announce(f"the check before training\n{as_text(report)}")
            else:
                report.save(Path(file))
        except OSError as error:
            problem = error
    stage.rendezvous.agree(("check told",), topology.world_ranks, problem)
    if report.errors and file is None:
        raise AgreedError(PreflightError(report))
