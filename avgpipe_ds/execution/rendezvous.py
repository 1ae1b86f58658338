"""Meeting points of ranks that block nobody.

A rank announces that it has come to a point, with a small payload if it likes, and goes on with other work; the point is
reached once all peers have announced theirs. The payloads make it an all-gather of host scalars at the same time: the clipping
norm over all stages and the loss over the data-parallel group are read off it. Before DeepSpeed's own blocking collectives it
makes sure that no rank waits in one for long.

An all-gather goes along a binary tree, up to its root and down again: n ranks need 2 (n - 1) messages, not n (n - 1),
and none sends more than three. Stages come in the tree's order, the first, its root, last.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable
from typing import Any

from avgpipe_ds.errors import AgreedError, RemoteError
from avgpipe_ds.execution.mailbox import Mailbox

__all__ = ["Rendezvous"]


class Rendezvous:
    """Announcements of this rank and its peers. A key may be used again once it was collected: channels keep their order."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._rank = mailbox.transport.rank

    def announce(self, key: Hashable, ranks: tuple[int, ...], payload: Any = None) -> None:
        """This rank has come to `key`; tells the other `ranks`."""
        for rank in ranks:
            if rank != self._rank:
                self._mailbox.send(rank, ("announce", key, self._rank), payload)

    def complete(self, key: Hashable, ranks: tuple[int, ...]) -> bool:
        """Whether all other `ranks` have announced `key`."""
        return all(self._mailbox.has(("announce", key, rank)) for rank in ranks if rank != self._rank)

    def collect(self, key: Hashable, ranks: tuple[int, ...], payload: Any = None) -> list[Any]:
        """The payloads in the order of `ranks`, this rank's own being `payload`; `key` must be complete and is then forgotten."""
        return [payload if rank == self._rank else self._mailbox.take(("announce", key, rank)).payload for rank in ranks]

    def gathering(
        self, key: Hashable, ranks: tuple[int, ...], payload: Any = None
    ) -> Generator[Callable[[], bool], None, list[Any]]:
        """All-gather that does not block: yields what to wait for, and returns the payloads in the order of `ranks`."""
        place = ranks.index(self._rank)
        parents = (ranks[(place - 1) // 2],) if place else ()
        children = ranks[2 * place + 1 : 2 * place + 3]
        yield lambda: self.complete((key, "up"), children)
        payloads = {self._rank: payload}
        for below in self.collect((key, "up"), children):
            payloads |= below
        if parents:
            self.announce((key, "up"), parents, payloads)
            yield lambda: self.complete((key, "down"), parents)
            (payloads,) = self.collect((key, "down"), parents)
        self.announce((key, "down"), children, payloads)
        return [payloads[rank] for rank in ranks]

    def gather(self, key: Hashable, ranks: tuple[int, ...], payload: Any = None) -> list[Any]:
        """`gathering`, blocking until all `ranks` have come."""
        steps = self.gathering(key, ranks, payload)
        try:
            while True:
                come = next(steps)
                while not come():
                    self._mailbox.wait()
        except StopIteration as end:
            return list(end.value)

    def agree(self, key: Hashable, ranks: tuple[int, ...], error: Exception | None, payload: Any = None) -> list[Any]:
        """`gather`, and an error on one rank is an error on all, before any of them has gone on.

        Raises:
            AgreedError: with this rank's own error, or what another rank's is here: a `ValueError` too, else a `RemoteError`.

        """
        told = None if error is None else (isinstance(error, ValueError), f"{type(error).__name__}: {error}")
        everybody = self.gather(key, ranks, (told, payload))
        if error is not None:
            raise AgreedError(error) from error
        for rank, (other, _) in zip(ranks, everybody, strict=True):
            if other is not None:
                is_value_error, text = other
                raise AgreedError(ValueError(f"rank {rank}: {text}") if is_value_error else RemoteError(rank, text))
        return [theirs for _, theirs in everybody]
