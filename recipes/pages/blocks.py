"""Keeps the generated parts of a page apart from the written ones, so that no number is typed in by hand.

    <!-- speed: raw/emulated-k4.json -->
    anything: it is replaced
    <!-- end -->

A block names what makes it and the raw results it is made of, relative to the page.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from common.errors import RecipeError

__all__ = ["Maker", "blocks", "refresh"]

Maker = Callable[[list[Path]], str]
"""Markdown of raw results."""

_BLOCK = re.compile(r"^<!-- (?P<maker>[a-z0-9-]+): (?P<files>[^>]+?) -->\n.*?^<!-- end -->$", re.MULTILINE | re.DOTALL)
_OPENING = re.compile(r"^[ \t]*<!--[ \t]*[\w-]+[ \t]*:.*-->[ \t]*$", re.MULTILINE)  # also what was meant to be one


def blocks(page: str, folder: Path) -> Iterator[tuple[str, list[Path]]]:
    """The maker and the raw results of each block of a page whose files are in `folder`."""
    for match in _BLOCK.finditer(page):
        yield match["maker"], [folder / name for name in match["files"].split()]


def refresh(page: str, folder: Path, makers: Mapping[str, Maker]) -> str:
    """The page with all its blocks made anew.

    Args:
        page: Markdown.
        folder: where the files that it names are.
        makers: by name.

    Raises:
        ValueError: a block has no end, names no known maker, or a file that is not there.

    """
    if len(_BLOCK.findall(page)) != len(_OPENING.findall(page)):
        raise ValueError(
            "a block has no end: each <!-- name: files --> needs its <!-- end --> before the next, both alone on their lines"
        )

    def made(match: re.Match[str]) -> str:
        maker, names = match["maker"], match["files"].split()
        if maker not in makers:
            raise ValueError(f"there is no maker {maker!r} for {match['files']}; there are {', '.join(sorted(makers))}")
        files = [folder / name for name in names]
        missing = [str(file) for file in files if not file.exists()]
        if missing:
            raise ValueError(f"block {maker!r} needs {', '.join(missing)}, which is not there")
        try:
            text = makers[maker](files).strip()
        except (ArithmeticError, LookupError, OSError, RecipeError, TypeError, ValueError) as error:
            found = f"{type(error).__name__}: {error}"
            raise ValueError(f"block {maker!r} can't be made of {match['files']}: {found}") from error
        return f"<!-- {maker}: {match['files']} -->\n\n{text}\n\n<!-- end -->"

    return _BLOCK.sub(made, page)
