"""What a job tells its user while it trains."""

from __future__ import annotations

__all__ = ["announce"]


def announce(message: str) -> None:
    """Print a line, at once. On one rank only, which the caller sees to.

    To standard output, as DeepSpeed prints its steps: its logger shows nothing below warnings unless it is told to, and neither
    does Python's.
    """
    print(message, flush=True)
