"""Watch the layers of a stage while it computes as usual."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from deepspeed.pipe import PipelineModule

from avgpipe_ds.deepspeed_compat.module import layers_of

__all__ = ["watched"]


@contextmanager
def watched(module: PipelineModule, around: Callable[[int, Callable[[Any], Any], Any], Any]) -> Iterator[None]:
    """Inside the block, `module(inputs)` calls each of its layers through `around(number, layer, inputs)`.

    The module's own forward does so, whatever a subclass makes of it. Activations are kept, not computed again: a layer is
    called once per forward.
    """
    before = module.forward_funcs, module.activation_checkpoint_interval, module.micro_offset
    module.forward_funcs = [partial(around, number, function) for number, function in layers_of(module)]
    module.activation_checkpoint_interval = 0
    try:
        yield
    finally:
        module.forward_funcs, module.activation_checkpoint_interval, module.micro_offset = before
