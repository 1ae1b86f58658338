"""Choosing a name among known ones, with the nearest known name in the error."""

from collections.abc import Iterable

from avgpipe_ds.data.suggest import did_you_mean
from common.errors import RecipeError

__all__ = ["did_you_mean", "pick"]


def pick(name: str, known: Iterable[str], *, what: str) -> str:
    """Return `name` when it is among `known`, otherwise raise a `RecipeError` that lists them."""
    choices = list(known)
    if name in choices:
        return name
    raise RecipeError(f"Unknown {what} {name!r}.{did_you_mean(name, choices)} Known: {', '.join(map(repr, choices)) or 'none'}.")
