"""Make the tables and plots of pages from the raw results that they name, so that no figure is typed in by hand.

    PAGES="README.md docs/benchmarks/README.md docs/tuning.md"
    python recipes/report.py $PAGES            # after new results were put into docs/benchmarks/raw
    python recipes/report.py $PAGES --check    # whether the pages are what the raw results say

See pages/blocks.py for what stands in a page. The plot of a block is `plots/<its first file>.svg` beside the page.
"""

from pathlib import Path
from typing import Annotated

import typer
from common.errors import RecipeError
from pages.accuracy import accuracy
from pages.blocks import Maker, blocks, refresh
from pages.bubbles import bubbles
from pages.costs import costs
from pages.plots import Drawer, bars, curves
from pages.speed import means, rivals, setup, speed, tried
from pages.times import times
from pages.tuning import advances, choices, predictions

MAKERS: dict[str, Maker] = {
    "speed": speed,
    "means": means,
    "rivals": rivals,
    "setup": setup,
    "tried": tried,
    "bubbles": bubbles,
    "costs": costs,
    "accuracy-95": accuracy(0.95),
    "accuracy-90": accuracy(0.90),
    "times-95": times(0.95),
    "times-90": times(0.90),
    "predictions": predictions,
    "choices": choices,
    "advances": advances,
    "rates-90": accuracy(0.90, every_rate=True),
}

DRAWERS: dict[str, Drawer] = {"speed": bars, "accuracy-95": curves(0.95), "accuracy-90": curves(0.90)}


def main(
    pages: Annotated[list[Path], typer.Argument(exists=True, dir_okay=False, help="Markdown; names files relative to itself")],
    check: Annotated[bool, typer.Option("--check", help="change nothing; fail if something would change")] = False,
) -> None:
    """Refresh the generated blocks of pages."""
    for page in pages:
        old = page.read_text()
        try:
            new = refresh(old, page.parent, MAKERS)
        except ValueError as error:
            raise typer.BadParameter(f"{page}: {error}") from error
        if check and new != old:
            typer.echo(f"{page} differs from its raw results: run python recipes/report.py {page}", err=True)
            raise typer.Exit(1)
        if not check:
            page.write_text(new)
            _draw(page, new)


def _draw(page: Path, text: str) -> None:
    for maker, files in blocks(text, page.parent):
        if maker in DRAWERS:
            try:
                DRAWERS[maker](files, page.parent / "plots" / f"{files[0].stem}.svg")
            except RecipeError as error:
                raise typer.BadParameter(f"{page}: {error}") from error


if __name__ == "__main__":
    typer.run(main)
