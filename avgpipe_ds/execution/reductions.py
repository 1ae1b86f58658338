"""Gradient reductions that do not block: a pipeline starts one and is parked until it is done, while the others compute.

Each function is a generator of conditions; the pipeline waits for one after the other. Every pipeline reduces on a lane of its
own, so pipelines may come to their reductions in different orders on different ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator

import torch
from torch import Tensor

from avgpipe_ds import deepspeed_compat as compat
from avgpipe_ds.execution.stage import Stage

__all__ = ["reduce_gradients", "reduce_tied_gradients"]

_BUCKET_NUMEL = 1 << 24


def reduce_tied_gradients(engine: compat.StageEngine, stage: Stage, lane: int) -> Generator[Callable[[], bool], None, None]:
    """Sum the gradients of tied weights over the stages that hold a copy."""
    pending = _Countdown()
    for gradient, ranks in compat.tied_gradients(engine):
        pending.start(stage, [gradient], ranks, lane)
    yield pending.done


def reduce_gradients(engine: compat.StageEngine, stage: Stage, lane: int) -> Generator[Callable[[], bool], None, None]:
    """Average the gradients over the data-parallel replicas, with DeepSpeed's factors and communication dtype."""
    if compat.reduces_gradients_itself(engine):
        return
    gradients = compat.gradients_to_reduce(engine)
    replicas = stage.topology.replica_ranks
    if len(replicas) == 1:
        return
    before, after, dtype = compat.scale_for_reduction(engine, len(replicas))
    pending = _Countdown()
    buckets = list(_buckets(gradients))
    flats = [torch.cat([gradient.reshape(-1) for gradient in bucket]).to(dtype) for bucket in buckets]
    for flat in flats:
        flat.mul_(before)
        pending.start(stage, [flat], replicas, lane)
    yield pending.done
    for bucket, flat in zip(buckets, flats, strict=True):
        flat.mul_(after)
        pieces = torch.split(flat, [gradient.numel() for gradient in bucket])
        torch._foreach_copy_(bucket, [piece.view_as(gradient) for piece, gradient in zip(pieces, bucket, strict=True)])


class _Countdown:
    """Counts the all-reductions that are still under way."""

    def __init__(self) -> None:
        self._left = 0

    def start(self, stage: Stage, tensors: list[Tensor], ranks: tuple[int, ...], lane: int) -> None:
        self._left += 1
        stage.mailbox.transport.all_reduce(tensors, ranks, lane, self._finished)

    def done(self) -> bool:
        return self._left == 0

    def _finished(self) -> None:
        self._left -= 1


def _buckets(gradients: list[Tensor]) -> Iterator[list[Tensor]]:
    """Runs of gradients of one dtype, of about `_BUCKET_NUMEL` elements."""
    bucket: list[Tensor] = []
    numel = 0
    for gradient in gradients:
        if bucket and (gradient.dtype != bucket[0].dtype or numel + gradient.numel() > _BUCKET_NUMEL):
            yield bucket
            bucket, numel = [], 0
        bucket.append(gradient)
        numel += gradient.numel()
    if bucket:
        yield bucket
