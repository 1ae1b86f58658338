"""What all ranks do together: train, evaluate, save, load.

Training makes no rank wait for all others, so nobody announces it. The other calls do: a rank that trains meanwhile sees the
announcement of a call that it is not in.
"""

from __future__ import annotations

from types import TracebackType

from avgpipe_ds.errors import AgreedError, AvgPipeError
from avgpipe_ds.execution.mailbox import Mailbox

__all__ = ["TRAINING", "CollectiveCall"]

TRAINING = "train_batch"
"""The call for which no rank waits."""


class CollectiveCall:
    """A block that every rank enters, by the name of the call; used again and again.

    A failure inside is told to the other ranks, and theirs is raised here; after it no block can be entered any more. An error
    that all ranks agree on passes as it is. (A class, not a generator: the end of the data is a `StopIteration`, which can't
    leave a generator.)

    Args:
        mailbox: by which ranks tell each other.

    """

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._failure: BaseException | None = None
        self._name = TRAINING

    def __call__(self, name: str) -> CollectiveCall:
        """The block of this call; all but `TRAINING` begin when all ranks have come."""
        self._name = name
        return self

    def stop(self, reason: BaseException) -> None:
        """No block can be entered any more."""
        self._failure = self._failure or reason

    @property
    def usable(self) -> bool:
        """Whether blocks can still be entered."""
        return self._failure is None

    def expect_training(self) -> None:
        """To be asked again and again by a rank that trains.

        Raises:
            AvgPipeError: another rank is in another call.

        """
        channel = ("call", self._mailbox.calls)
        if self._mailbox.has(channel):
            message = self._mailbox.take(channel)
            raise AvgPipeError(self._different({message.source: message.payload, self._mailbox.transport.rank: TRAINING}))

    def __enter__(self) -> None:
        if self._failure is not None:
            raise AvgPipeError(f"this engine stopped earlier: {type(self._failure).__name__}: {self._failure}")
        self._mailbox.calls += 1
        if self._name == TRAINING:
            return
        try:
            self._meet()
        except BaseException as error:
            self._leave(error)
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if error is not None:
            self._leave(error)

    def _meet(self) -> None:
        """Each rank tells every other one, so that those that train hear of it, too."""
        mailbox, rank = self._mailbox, self._mailbox.transport.rank
        channel, names = ("call", mailbox.calls), {rank: self._name}
        for other in range(mailbox.transport.world_size):
            if other != rank:
                mailbox.send(other, channel, self._name)
        while len(names) < mailbox.transport.world_size:
            while not mailbox.has(channel):
                mailbox.wait()
            message = mailbox.take(channel)
            names[message.source] = message.payload
        if len(set(names.values())) > 1:
            raise AgreedError(ValueError(self._different(names)))

    def _different(self, names: dict[int, str]) -> str:
        found = "; ".join(f"{self._mailbox.name_of(rank)} is in {name}" for rank, name in sorted(names.items()))
        return f"every rank must make the same calls in the same order, but {found}"

    def _leave(self, error: BaseException) -> None:
        if isinstance(error, AgreedError):
            raise error.error from error.error.__cause__
        self._failure = cause = self._mailbox.cause_of(error)
        self._mailbox.abort(cause)
        if cause is not error:
            raise cause from error
