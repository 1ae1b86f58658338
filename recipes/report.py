"""Make the tables of docs/benchmarks/README.md from the raw results beside it.

python recipes/report.py docs/benchmarks            # after new results were put into docs/benchmarks/raw
python recipes/report.py docs/benchmarks --check    # whether the page is what its raw results say
"""

from pathlib import Path
from typing import Annotated

import typer
from pages.accuracy import accuracy
from pages.blocks import Maker, refresh
from pages.bubbles import bubbles
from pages.speed import means, setup, speed, tried

MAKERS: dict[str, Maker] = {
    "speed": speed,
    "means": means,
    "setup": setup,
    "tried": tried,
    "bubbles": bubbles,
    "accuracy": accuracy(0.95),
    "accuracy-high": accuracy(0.98),
}


def main(
    folder: Annotated[Path, typer.Argument(help="with README.md and the raw results that it names")],
    check: Annotated[bool, typer.Option("--check", help="change nothing; fail if something would change")] = False,
) -> None:
    """Refresh the generated blocks of a page."""
    page = folder / "README.md"
    if not page.is_file():
        raise typer.BadParameter(f"there is no {page}")
    old = page.read_text()
    try:
        new = refresh(old, folder, MAKERS)
    except ValueError as error:
        raise typer.BadParameter(f"{page}: {error}") from error
    if check and new != old:
        typer.echo(f"{page} differs from its raw results: run python recipes/report.py {folder}", err=True)
        raise typer.Exit(1)
    if not check:
        page.write_text(new)


if __name__ == "__main__":
    typer.run(main)
