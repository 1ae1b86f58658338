"""Files that are there as a whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["replacing"]


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """A path beside `file` to be written inside the block; it takes the place of `file` when the block ends without an error.

    Raises:
        OSError: it can't be moved there.

    """
    part = file.with_name(f".{file.name}.part")
    try:
        yield part
        os.replace(part, file)
    finally:
        part.unlink(missing_ok=True)
