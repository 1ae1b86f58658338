"""Exceptions that users of the package can see.

Everything that goes wrong while training derives from `AvgPipeError`. The two exceptions that callers may already handle under a
built-in name derive from that name instead: a bad setting is a `ValueError`, the end of the data a `StopIteration`.
"""

from __future__ import annotations

__all__ = [
    "AgreedError",
    "AvgPipeError",
    "ConfigError",
    "DataError",
    "DataExhausted",
    "IncompleteIteration",
    "NonFiniteLoss",
    "PeerLost",
    "RemoteError",
    "ScheduleError",
]


class AvgPipeError(RuntimeError):
    """Base class of what can go wrong while training."""


class AgreedError(Exception):
    """Internal: carries an error that every rank raises at the same point, so that nobody needs to be told and the engine stays
    usable.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class ConfigError(ValueError):
    """The "avgpipe" block of the configuration is wrong; the message lists every problem, not only the first."""


class DataError(ValueError):
    """A data set can't be trained on: something is missing, or a row of it is wrong.

    Found before anything is trained, and on every rank, since every rank reads the same.
    """


class DataExhausted(StopIteration):
    """The data ended exactly between two iterations; nothing of it was left untrained and the engine stays usable."""


class PeerLost(AvgPipeError):
    """Another rank no longer answers: its process died, or the link to it is down."""


class RemoteError(AvgPipeError):
    """Another rank failed; the message has its rank and the text of its error.

    Args:
        rank: global rank that failed first.
        text: the error as that rank printed it.

    """

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(f"rank {rank} failed: {text}")
        self.rank = rank
        self.text = text

    def __reduce__(self) -> tuple[type[RemoteError], tuple[int, str]]:
        # The default would call the constructor with the finished message as its only argument.
        return type(self), (self.rank, self.text)


class IncompleteIteration(AvgPipeError):
    """The data ended in the middle of an iteration. What was taken is kept: a new iterator completes it."""


class NonFiniteLoss(AvgPipeError):
    """A loss is NaN or infinite."""


class ScheduleError(AvgPipeError):
    """A schedule is invalid or would deadlock; the message has its timetable with the bad place marked."""
