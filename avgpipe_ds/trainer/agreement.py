"""What may fail on one rank before there is an engine that would tell the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from avgpipe_ds.errors import ConfigError

__all__ = ["on_every_rank"]

T = TypeVar("T")


def on_every_rank(action: Callable[[], T]) -> T:
    """What `action` gives. Every rank calls it, and `action` must not communicate.

    Raises:
        Exception: what it raised here.
        ConfigError: it raised on another rank.

    """
    result, problem = None, None
    try:
        result = action()
    except Exception as error:  # noqa: BLE001 - told to all ranks, before any of them waits for the others
        problem = error
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, None if problem is None else f"{type(problem).__name__}: {problem}")
    if problem is not None:
        raise problem
    for rank, told in enumerate(every):
        if told is not None:
            raise ConfigError(f"rank {rank} can't begin: {told}")
    return result  # type: ignore[return-value]
