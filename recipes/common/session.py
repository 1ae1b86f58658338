"""The frame around a recipe: who speaks, how errors end the process."""

import os
import sys
from collections.abc import Callable

from avgpipe_ds.errors import DataError
from common.errors import RecipeError
from common.narrator import Narrator

__all__ = ["run_recipe"]


def run_recipe(recipe: Callable[[Narrator], None]) -> None:
    """Run `recipe` and turn a `RecipeError` or `DataError` into one line and exit code 2; any other error keeps its traceback.

    The launcher's environment tells the rank before anything heavy is imported, so rank 0 can speak from the first moment.
    """
    rank = int(os.environ.get("RANK", "0"))
    with Narrator(enabled=rank == 0) as narrator:
        try:
            recipe(narrator)
        except (RecipeError, DataError) as error:
            print(f"[rank {rank}] error: {error}", file=sys.stderr, flush=True)
            sys.exit(2)
