"""Choosing a name among known ones, with the nearest known name in the error."""

import difflib
from collections.abc import Iterable

from common.errors import RecipeError

__all__ = ["pick"]


def pick(name: str, known: Iterable[str], *, what: str) -> str:
    """Return `name` when it is among `known`, otherwise raise a `RecipeError` that lists them."""
    choices = list(known)
    if name in choices:
        return name
    nearest = difflib.get_close_matches(name, choices, n=1)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    raise RecipeError(f"Unknown {what} {name!r}.{hint} Known: {', '.join(map(repr, choices)) or 'none'}.")
