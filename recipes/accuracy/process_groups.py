"""Process groups of engines that are gone."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from deepspeed.utils import groups

__all__ = ["released_process_groups"]


@contextmanager
def released_process_groups() -> Iterator[None]:
    """Destroy the groups that the block makes: DeepSpeed keeps them, and each has a thread of gloo's that wakes all the time.

    To be left without a reference to an engine, so that its memory goes, too. Every rank calls it.
    """
    groups._get_data_parallel_group()  # DeepSpeed makes it once and keeps it
    kept = set(dist.distributed_c10d._world.pg_map)
    yield
    groups.mpu = None  # refers to the last engine's groups
    gc.collect()  # engines refer to themselves
    for group in set(dist.distributed_c10d._world.pg_map) - kept:
        dist.destroy_process_group(group)
