"""Which column holds what, and the values in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from avgpipe_ds.data.suggest import did_you_mean
from avgpipe_ds.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset

__all__ = ["LABELS", "MESSAGES", "TAGS", "TEXTS", "WORDS", "checked_texts", "choose_column", "column_values"]

# Usual names of columns, the most usual first.
TEXTS = ("text", "sentence", "content", "document", "review")
LABELS = ("label", "labels", "category", "class", "target")
WORDS = ("tokens", "words")
TAGS = ("ner_tags", "tags", "pos_tags", "labels")
MESSAGES = ("messages", "conversation", "conversations")


def choose_column(table: Dataset, chosen: str | None, *, usual: Sequence[str], argument: str) -> str:
    """The column that was chosen, or else the first with a usual name.

    Args:
        table: that has the column.
        chosen: by the user; None for a usual name.
        usual: names to try.
        argument: what the user calls the choice, for the error.

    Raises:
        DataError: there is no such column.

    """
    columns = list(table.column_names)
    known = ", ".join(map(repr, columns)) or "none"
    if chosen is not None:
        if chosen in columns:
            return chosen
        raise DataError(f"{argument}={chosen!r}: there is no such column.{did_you_mean(chosen, columns)} Columns: {known}.")
    for name in usual:
        if name in columns:
            return name
    raise DataError(f"{argument} is needed: none of the columns {known} has a usual name ({', '.join(usual)}).")


def column_values(table: Dataset, column: str) -> list[Any]:
    """The values of a column, as Python objects, whatever format the table is set to."""
    values: list[Any] = table.with_format(None).select_columns([column])[:][column]
    return values


def checked_texts(values: Sequence[Any], rows: Sequence[int], *, column: str) -> list[str]:
    """`values` if each is a string with something in it.

    Raises:
        DataError: one is not; it names the row.

    """
    for row, value in zip(rows, values, strict=True):
        if not isinstance(value, str) or not value.strip():
            raise DataError(f"row {row}: column {column!r} must hold text in every row, but holds {value!r} there.")
    return list(values)
