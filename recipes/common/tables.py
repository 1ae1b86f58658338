"""Tables of a hub data set, a local file or a local folder, through the `datasets` library.

Every rank loads for itself. The library keeps what it converted in a cache under a file lock, so ranks that start
together convert once and then read the same rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import RecipeError
from common.suggest import did_you_mean

if TYPE_CHECKING:
    from datasets import Dataset

__all__ = ["Tables", "load_tables"]

#: Local files by how their name ends: the library's builder and its options.
_BUILDERS: dict[str, tuple[str, dict[str, Any]]] = {
    ".csv": ("csv", {}),
    ".tsv": ("csv", {"sep": "\t"}),
    ".json": ("json", {}),
    ".jsonl": ("json", {}),
    ".txt": ("text", {"sample_by": "document"}),
}
_VALIDATION_NAMES = ("validation", "valid", "dev", "test")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """The rows to train on, and the rows to validate on where the data set has such a part."""

    train: "Dataset"
    validation: "Dataset | None"


def load_tables(name: str, *, subset: str | None = None, packaged: Sequence[str] = ()) -> Tables:
    """Load `name`: a local csv, tsv, json, jsonl or txt file, a local folder, or a data set of the hub.

    Args:
        name: as the user gave it.
        subset: which configuration of a hub data set.
        packaged: names that the user may have meant, for the error.

    Raises:
        RecipeError: there is no such file, its kind is unknown, it cannot be read or has no rows, or the hub does not have it.

    """
    import datasets

    datasets.disable_progress_bars()
    try:
        parts = _load(name, subset)
    except RecipeError:
        raise
    except Exception as error:  # the library raises a different class for every kind of bad file
        cause = error.__cause__ or error
        if "corresponds to no data" in str(error):
            raise RecipeError(f"--dataset {name}: has no rows.") from error
        hint = did_you_mean(name, packaged)
        raise RecipeError(f"--dataset {name}: could not be loaded.{hint} {type(cause).__name__}: {cause}") from error
    train = parts.get("train", next(iter(parts.values())))
    validation = next((parts[part] for part in _VALIDATION_NAMES if part in parts and parts[part] is not train), None)
    return Tables(train=train, validation=validation)


def _load(name: str, subset: str | None) -> "dict[str, Dataset]":
    import datasets

    path = Path(name).expanduser()
    if path.is_file():
        if not path.read_bytes()[:4096].strip():
            raise RecipeError(f"--dataset {name}: the file is empty.")
        if path.suffix not in _BUILDERS:
            raise RecipeError(f"--dataset {name}: cannot tell what it is. Known endings: {', '.join(_BUILDERS)}.")
        builder, options = _BUILDERS[path.suffix]
        return dict(datasets.load_dataset(builder, data_files={"train": [str(path)]}, **options))
    if path.is_dir():
        texts = sorted(map(str, path.glob("*.txt")))
        if texts:  # left to itself the library makes a row of every line, and a document would fall apart
            return dict(datasets.load_dataset("text", data_files={"train": texts}, sample_by="document"))
        return dict(datasets.load_dataset(str(path), subset))
    if path.suffix in _BUILDERS or name.startswith(("/", ".", "~")):
        raise RecipeError(f"--dataset {name}: there is no such file or folder.")
    return dict(datasets.load_dataset(name, subset))
