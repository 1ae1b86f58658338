"""Which column holds the text and which the label, and class ids from whatever the label column holds."""

from collections.abc import Sequence
from typing import Any

from common.errors import RecipeError
from common.suggest import pick

__all__ = ["encode_labels", "label_column", "non_empty_texts", "text_column"]

_TEXT_NAMES = ("text", "sentence", "content", "document", "review")
_LABEL_NAMES = ("label", "labels", "category", "class", "target")


def text_column(columns: Sequence[str], chosen: str | None) -> str:
    """Return the column that holds the text: the chosen one, or the first with a usual name."""
    return _column(columns, chosen, usual=_TEXT_NAMES, option="--text-column")


def label_column(columns: Sequence[str], chosen: str | None) -> str:
    """Return the column that holds the label: the chosen one, or the first with a usual name."""
    return _column(columns, chosen, usual=_LABEL_NAMES, option="--label-column")


def non_empty_texts(values: Sequence[Any], *, column: str) -> list[str]:
    """Return `values` when each is a string with something in it; otherwise raise and name the first bad row."""
    for row, value in enumerate(values):
        if not isinstance(value, str) or not value.strip():
            raise RecipeError(f"Column {column!r} must hold text in every row, but row {row} holds {value!r}.")
    return list(values)


def encode_labels(values: Sequence[Any], names: Sequence[str] | None, *, column: str) -> tuple[list[int], list[str]]:
    """Return a class id for every row, and the name of every class.

    Args:
        values: the label column, as strings, booleans or integers.
        names: the class names where the data set declares them; the values are then ids already, and are kept as they
            are. Without them the distinct values, sorted, become the classes.
        column: how the column is called, for the errors.

    """
    for row, value in enumerate(values):
        if not isinstance(value, (str, int)) or value == "":
            raise RecipeError(
                f"Column {column!r} must hold a class in every row, as text or integer, but row {row} holds {value!r}."
            )
    if names is not None:
        return [int(value) for value in values], list(names)
    classes = sorted(set(values), key=lambda value: (isinstance(value, str), value))
    if len(classes) < 2:
        raise RecipeError(f"Column {column!r} holds {len(classes)} class(es); classification needs at least 2.")
    ids = {value: index for index, value in enumerate(classes)}
    return [ids[value] for value in values], [str(value) for value in classes]


def _column(columns: Sequence[str], chosen: str | None, *, usual: Sequence[str], option: str) -> str:
    if chosen is not None:
        return pick(chosen, columns, what=f"column ({option})")
    for name in usual:
        if name in columns:
            return name
    raise RecipeError(f"{option} is needed: none of the columns {list(columns)} has a usual name ({', '.join(usual)}).")
