"""The comparison of predictions as a table for people."""

from rich.console import Console
from rich.table import Table

from avgpipe_ds.tuning.predictors import PREDICTORS
from bench.tuning import Conclusions

__all__ = ["print_tuning"]


def print_tuning(found: Conclusions) -> None:
    """Print the grid, and what the predictors would have chosen."""
    table = Table(title="seconds per B samples, measured (median) and predicted")
    for column in ("setting", "measured", *PREDICTORS, "memory, predicted / measured"):
        table.add_column(column, justify="left" if column == "setting" else "right")
    for place, one in enumerate(found.measured):
        predicted = [found.predicted_s(name, place) for name in PREDICTORS]
        cells = [f"{seconds:.4f} ({seconds / one.median_s - 1:+.0%})" for seconds in predicted]
        table.add_row(str(one.setting), f"{one.median_s:.4f}", *cells, f"{found.memory_error(place):+.1%}")
    console = Console(width=130)
    console.print(table)
    for name in PREDICTORS:
        console.print(
            f"{name}: chose {found.chosen[name]}, regret {found.regret(name):.1%},"
            f" rank correlation {found.correlation(name):.3f}",
            highlight=False,
        )
    for search in found.searches:
        console.print(
            f"auto: {search.settled} after {search.iterations} iterations, {found.loss(search):+.1%} of the fastest advance",
            highlight=False,
        )
    console.print(f"an activation travels for {found.message_share:.2f} of a forward", highlight=False)
    console.print(
        f"the profile took {found.profile_s:.1f} s; two settings for 20 batches each take {found.two_settings_s:.1f} s",
        highlight=False,
    )
