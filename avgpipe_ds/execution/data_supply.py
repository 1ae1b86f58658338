"""All ranks agree on whether there is data for an iteration.

Only the first and the last stage see the iterator, and a stage between them would wait forever for an activation that never
comes. So a rank that lacks data says so, and `train_batch` ends in the same way on all of them; a rank that does have data
knows that the iterators differ, which no training survives.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from avgpipe_ds.errors import AvgPipeError, DataExhausted, IncompleteIteration
from avgpipe_ds.execution.stage import Stage

__all__ = ["DataSupply"]


class DataSupply:
    """This rank's part of the agreement.

    Args:
        stage: whose feed is filled.
    """

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._size = stage.num_pipelines * stage.num_micro_batches
        self._attempts = 0
        self._count = 0

    def take(self, iteration: int, data_iter: Iterator[Any] | None) -> None:
        """Take an iteration's data from `data_iter`, and tell the others if it is too little.

        Raises:
            TypeError, ValueError: there is no iterator.
            Exception: what the iterator raised.
        """
        stage = self._stage
        if not stage.topology.takes_data:
            return
        if data_iter is None:
            raise ValueError(
                "the first and the last stage need data: pass data_iter to train_batch, or training_data to initialize"
            )
        if not hasattr(data_iter, "__next__"):
            raise TypeError(
                f"data_iter must be an iterator, got a {type(data_iter).__name__}: pass iter(loader), made once per epoch"
            )
        stage.feed.use(data_iter)
        self._count = stage.feed.count(iteration)
        if self._count < self._size:
            stage.rendezvous.announce(self._key(iteration), stage.topology.world_ranks, self._count)

    def ended(self, iteration: int) -> bool:
        """Whether all ranks that take data have too little of it for this iteration.

        Raises:
            AvgPipeError: another rank's data has ended, this one's has not.
        """
        stage, key = self._stage, self._key(iteration)
        others = [rank for rank in stage.topology.data_ranks if rank != stage.topology.rank]
        lacking = [rank for rank in others if stage.rendezvous.complete(key, (rank,))]
        if stage.topology.takes_data and self._count == self._size:
            if lacking:
                left = stage.rendezvous.collect(key, (lacking[0],))[0]
                raise AvgPipeError(
                    f"the data of rank {lacking[0]} ended at iteration {iteration} with {left} of {self._size} micro-batches, "
                    f"that of rank {stage.topology.rank} did not: first and last stage must be given the same "
                    "data, replicas as much"
                )
            return False
        return len(lacking) == len(others)

    def end(self, iteration: int) -> Exception:
        """What to raise on every rank once the data has `ended`; training can go on with a new iterator.

        Raises:
            AvgPipeError: the ranks' data ended at different places.
        """
        stage = self._stage
        counts = set(stage.rendezvous.collect(self._key(iteration), stage.topology.data_ranks, self._count))
        self._attempts += 1
        if len(counts) > 1:
            raise AvgPipeError(
                f"the data of first and last stages ended at different places: {sorted(counts)} of {self._size} "
                "micro-batches are left"
            )
        left = counts.pop()
        if left:
            return IncompleteIteration(
                f"the data ended within iteration {iteration}: {left} micro-batches are left, an iteration takes {self._size} "
                f"({stage.num_pipelines} pipelines x {stage.num_micro_batches} micro-batches). They are kept: pass a new "
                "iterator to go on, or give the loader a multiple"
            )
        what = "the data iterator is empty" if iteration == 0 else f"the data ended after {iteration} iterations"
        return DataExhausted(f"{what}: pass a new iterator to train_batch to go on")

    def _key(self, iteration: int) -> tuple[str, int, int]:
        return ("ended", iteration, self._attempts)
