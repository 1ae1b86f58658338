"""matplotlib for files: no window, and the same picture from the same figures."""

from typing import Any

from common.errors import RecipeError

__all__ = ["import_pyplot"]


def import_pyplot() -> Any:
    """Matplotlib's pyplot, set up to draw into files.

    Raises:
        RecipeError: matplotlib is missing.

    """
    try:
        import matplotlib
    except ImportError as error:
        raise RecipeError("plots need matplotlib: pip install matplotlib.") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    # Text stays text, and names in a file do not depend on chance: small files, and no changes where nothing changed.
    pyplot.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "avgpipe_ds"})
    return pyplot
