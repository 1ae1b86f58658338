"""Markdown tables."""

from collections.abc import Sequence

__all__ = ["spread", "table"]


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose first column is text and whose others are figures."""
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def spread(middle: float, low: float, high: float, style: str = ".2f") -> str:
    """`1.40 (1.33 .. 1.42)`."""
    return f"{middle:{style}} ({low:{style}} .. {high:{style}})"
