"""N copies of what a user passes to `initialize`, with one stored copy of everything that does not train."""

from __future__ import annotations

import copy
from typing import Any

from avgpipe_ds import deepspeed_compat as compat

__all__ = ["replicate"]


def replicate(module: compat.PipelineModule, *belongings: Any) -> tuple[Any, ...]:
    """Deep copies of a module and of objects that refer to its parameters (an optimizer, parameter groups, a scheduler),
    consistent with each other.

    Frozen parameters and what stands for the cluster (process groups, topology) are shared with the original, not copied.
    Attributes of parameters are taken over, which torch does not: DeepSpeed marks there which copy of a tied weight counts.

    Raises:
        TypeError: something can't be copied.

    """
    shared = [p for p in module.parameters() if not p.requires_grad] + compat.communicators_of(module)
    memo = {id(thing): thing for thing in shared}
    try:
        copies = copy.deepcopy((module, *belongings), memo)
    except Exception as error:
        raise TypeError(
            f"can't copy the model for another pipeline: {error}. Layers, loss_fn, optimizer and scheduler must survive "
            "copy.deepcopy; pass the optimizer and the scheduler as callables, or in the configuration, if it is one of these"
        ) from error
    for original, copied in zip(module.parameters(), copies[0].parameters(), strict=True):
        vars(copied).update(vars(original))
    return copies
