"""Class ids from whatever a label column holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from avgpipe_ds.errors import DataError

__all__ = ["Classes", "Located", "find_classes"]

Located = tuple[int, Any]
"""A row and a label in it."""


@dataclass(frozen=True, slots=True)
class Classes:
    """The names of the classes, in the order of their ids, and the id of every label that occurs."""

    names: tuple[str, ...]
    ids: Mapping[Any, int]


def find_classes(parts: Mapping[str, Iterable[Located]], declared: Sequence[str] | None, *, column: str) -> Classes:
    """The classes of a label column.

    Args:
        parts: the labels, by the name of the part ("training" first); strings, booleans or integers.
        declared: the names of the classes in the order of their ids, where the data set or the user says them; labels are then
            ids or names. Without them the distinct labels, sorted, become the classes.
        column: how the column is called, for the errors.

    Raises:
        DataError: a row has no label, another kind of label than those before it, or one outside the declared classes; a label
            occurs in the validation part only; or there are fewer than two classes.

    """
    seen = {part: _distinct(labels, part=part, column=column, declared=declared) for part, labels in parts.items()}
    kinds = {type(label).__name__ for labels in seen.values() for label in labels}
    if len(kinds) > 1:
        raise DataError(f"Column {column!r} holds labels of different types in its parts: {', '.join(sorted(kinds))}.")
    if declared is not None:
        ids = {label: _declared_id(label, declared) for labels in seen.values() for label in labels}
        return Classes(tuple(declared), {label: number for label, number in ids.items() if number is not None})
    train, *others = seen.values()
    classes = sorted(train)
    unseen = sorted(set().union(*others) - set(train))
    if unseen:
        raise DataError(f"The validation data has classes that the training data lacks: {unseen}.")
    if len(classes) < 2:
        raise DataError(f"Column {column!r} holds {len(classes)} class(es); classification needs at least 2.")
    return Classes(tuple(map(str, classes)), {label: index for index, label in enumerate(classes)})


def _distinct(labels: Iterable[Located], *, part: str, column: str, declared: Sequence[str] | None) -> dict[Any, int]:
    """The first row of every label; a dict, to keep the order of rows."""
    first: dict[Any, int] = {}
    kind: type | None = None
    for row, label in labels:
        if type(label) is not kind or label == "":
            _check_kind(row, label, kind, part=part, column=column)
            kind = type(label)
        if label not in first:
            if declared is not None and _declared_id(label, declared) is None:
                raise DataError(_outside(row, label, declared, part=part))
            first[label] = row
    return first


def _check_kind(row: int, label: Any, kind: type | None, *, part: str, column: str) -> None:
    if not isinstance(label, str | int) or label == "":
        raise DataError(
            f"Column {column!r} must hold a class in every row, as text or integer,"
            f" but row {row} of the {part} data holds {label!r}."
        )
    if kind is not None:
        raise DataError(
            f"Column {column!r} must hold labels of one type, but row {row} of the {part} data holds {label!r}, a "
            f"{type(label).__name__}, after labels of type {kind.__name__}."
        )


def _declared_id(label: Any, declared: Sequence[str]) -> int | None:
    if isinstance(label, str):
        return declared.index(label) if label in declared else None
    return int(label) if 0 <= label < len(declared) else None


def _outside(row: int, label: Any, declared: Sequence[str], *, part: str) -> str:
    where = f"row {row} of the {part} data has label {label!r}"
    if isinstance(label, str):
        return f"{where}, which is none of the classes {', '.join(map(repr, declared))}."
    hint = "-1 usually marks a row without a label; choose another part or remove those rows"
    return f"{where}, outside 0 .. {len(declared) - 1} ({hint})."
