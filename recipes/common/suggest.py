"""Choosing a name among known ones, with the nearest known name in the error."""

import difflib
from collections.abc import Iterable

from common.errors import RecipeError

__all__ = ["did_you_mean", "pick"]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a question that names the nearest known name, with a blank before it; nothing when none is near."""
    nearest = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {nearest[0]!r}?" if nearest else ""


def pick(name: str, known: Iterable[str], *, what: str) -> str:
    """Return `name` when it is among `known`, otherwise raise a `RecipeError` that lists them."""
    choices = list(known)
    if name in choices:
        return name
    raise RecipeError(f"Unknown {what} {name!r}.{did_you_mean(name, choices)} Known: {', '.join(map(repr, choices)) or 'none'}.")
