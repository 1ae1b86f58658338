"""Finds a rank's place in the job and connects it to the others."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from avgpipe_ds import deepspeed_compat as compat
from avgpipe_ds.data_feed import DataFeed, prepare_micro_batch
from avgpipe_ds.execution.mailbox import Mailbox
from avgpipe_ds.execution.rendezvous import Rendezvous
from avgpipe_ds.execution.stage import Stage, Topology
from avgpipe_ds.memory.activations import ActivationMeter
from avgpipe_ds.tracing.recorder import Recorder
from avgpipe_ds.transport.base import Transport

__all__ = ["assemble_stage"]


def assemble_stage(engines: Sequence[compat.StageEngine]) -> Stage:
    """The stage of this rank with the engines of its pipelines, connected. Collective over all ranks."""
    engine, num_pipelines = engines[0], len(engines)
    device = torch.device(engine.device)
    stage_id, replica, ranks = compat.place_of(engine.module)
    topology = Topology(
        rank=ranks[replica][stage_id],
        num_stages=len(ranks[0]),
        stage_id=stage_id,
        pipeline_ranks=tuple(ranks[replica]),
        replica_ranks=tuple(row[stage_id] for row in ranks),
        world_ranks=tuple(sorted(rank for row in ranks for rank in row)),
        data_ranks=tuple(dict.fromkeys(rank for row in ranks for rank in (row[0], row[-1]))),
    )
    transport = _transport(device, ranks)
    tied = [tuple(row[stage] for stage in stages) for stages in compat.tied_stages(engine.module) for row in ranks]
    replicas = [tuple(row[stage] for row in ranks) for stage in range(topology.num_stages)]
    groups = [group for group in dict.fromkeys(tied + replicas) if len(group) > 1]
    transport.prepare_groups(groups, num_pipelines)
    stage_of = {rank: stage for row in ranks for stage, rank in enumerate(row)}
    mailbox = Mailbox(transport, lambda rank: f"rank {rank} (stage {stage_of[rank]})")
    num_micro_batches = int(engine.gradient_accumulation_steps())

    def prepare(item: object) -> tuple[object, object]:
        batch = engine.batch_fn(item) if engine.batch_fn else item
        return prepare_micro_batch(batch, device, first_stage=topology.is_first, last_stage=topology.is_last)

    recorder = Recorder()
    activations = ActivationMeter(device, [weight for one in engines for weight in one.module.parameters()])
    feed = DataFeed(num_pipelines * num_micro_batches, prepare, recorder)
    return Stage(topology, device, mailbox, Rendezvous(mailbox), feed, num_pipelines, num_micro_batches, recorder, activations)


def _transport(device: torch.device, ranks: list[list[int]]) -> Transport:
    if device.type == "cuda":
        from avgpipe_ds.transport.nccl import NcclTransport

        down = [(a, b) for row in ranks for a, b in zip(row, row[1:], strict=False)]
        outputs = [(row[-1], rank) for row in ranks for rank in row[:-1]]
        return NcclTransport(device, list(dict.fromkeys(down + [(b, a) for a, b in down] + outputs)))
    from avgpipe_ds.transport.gloo import GlooTransport

    return GlooTransport(device)
