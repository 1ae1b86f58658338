"""The one exception whose message is meant for the person who started the recipe."""

__all__ = ["RecipeError"]


class RecipeError(ValueError):
    """A wrong argument or input; recipes print it without a traceback and exit with code 2."""
