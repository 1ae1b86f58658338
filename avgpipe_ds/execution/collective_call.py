"""What all ranks do together: train, evaluate, save, load."""

from __future__ import annotations

from types import TracebackType

from avgpipe_ds.errors import AgreedError, AvgPipeError
from avgpipe_ds.execution.mailbox import Mailbox

__all__ = ["CollectiveCall"]


class CollectiveCall:
    """A block that every rank enters; used again and again.

    A failure inside is told to the other ranks, and theirs is raised here; after it no block can be entered any more. An error
    that all ranks agree on passes as it is. (A class, not a generator: the end of the data is a `StopIteration`, which can't
    leave a generator.)

    Args:
        mailbox: by which ranks tell each other.

    """

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._failure: BaseException | None = None

    def stop(self, reason: BaseException) -> None:
        """No block can be entered any more."""
        self._failure = self._failure or reason

    def __enter__(self) -> None:
        if self._failure is not None:
            raise AvgPipeError(f"this engine stopped earlier: {type(self._failure).__name__}: {self._failure}")
        self._mailbox.calls += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if error is None:
            return
        if isinstance(error, AgreedError):
            raise error.error from error.error.__cause__
        self._failure = cause = self._mailbox.cause_of(error)
        self._mailbox.abort(cause)
        if cause is not error:
            raise cause from error
