"""Whether a gradient finds its way back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

__all__ = ["nodes_of", "reaches"]


def nodes_of(values: Iterable[Any]) -> set[Node]:
    """Where in autograd's graph those values are that want a gradient."""
    return {get_gradient_edge(value).node for value in values if isinstance(value, Tensor) and value.requires_grad}


def reaches(outputs: Iterable[Any], wanted: set[Node]) -> bool:
    """Whether a gradient of `outputs` comes to any of the nodes `wanted`; goes no further back than to them."""
    seen: set[Node] = set()
    ahead = list(nodes_of(outputs))
    while ahead:
        node = ahead.pop()
        if node in wanted:
            return True
        if node not in seen:
            seen.add(node)
            ahead.extend(before for before, _ in node.next_functions if before is not None)
    return False
