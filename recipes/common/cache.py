"""Folders that are made once and then shared by all ranks and all later runs."""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

__all__ = ["cache_root", "folder_made_once"]


def cache_root() -> Path:
    """Return the folder for converted models: `$AVGPIPE_DS_CACHE`, or one in the user's cache folder."""
    chosen = os.environ.get("AVGPIPE_DS_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "avgpipe_ds"


def folder_made_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """Return `folder`, filled by `make` when it does not exist yet.

    All ranks call this at the same moment: the first to get the lock makes the folder, the others wait and find it.
    `make` writes into a neighbour that is renamed only when complete, so an interrupted run leaves no half of a model
    under the final name.
    """
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
            try:
                make(unfinished)
                unfinished.chmod(0o755)
                unfinished.rename(folder)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    return folder
