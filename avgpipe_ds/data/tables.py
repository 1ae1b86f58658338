"""Tables of rows, from wherever the user has them, through the `datasets` library.

Every rank loads for itself. The library keeps what it converted in a cache under a file lock, so ranks that start
together convert once and then read the same rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from avgpipe_ds.data.suggest import did_you_mean
from avgpipe_ds.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

__all__ = ["Tables", "load", "progress_bars"]

#: Local files by how their name ends: the library's builder and its options.
_BUILDERS: dict[str, tuple[str, dict[str, Any]]] = {
    ".csv": ("csv", {}),
    ".tsv": ("csv", {"sep": "\t"}),
    ".json": ("json", {}),
    ".jsonl": ("json", {}),
    ".parquet": ("parquet", {}),
    ".txt": ("text", {}),
}
_VALIDATION_NAMES = ("validation", "valid", "dev", "test")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """The rows to train on, and the rows to validate on where there are any."""

    train: Dataset
    validation: Dataset | None = None

    def __post_init__(self) -> None:
        for part, table in self.parts().items():
            if not len(table):
                raise DataError(f"The {part} data has no rows.")

    def parts(self) -> dict[str, Dataset]:
        """The tables by the name that errors give them."""
        return {"training": self.train} | ({} if self.validation is None else {"validation": self.validation})


def load(
    source: str | Path | Dataset | DatasetDict | Mapping[str, Dataset],
    *,
    subset: str | None = None,
    sample_by: Literal["document", "paragraph", "line"] = "document",
    known: Sequence[str] = (),
) -> Tables:
    """Load `source`: a local csv, tsv, json, jsonl, parquet or txt file, a folder, a data set of the hub, or one in memory.

    Of several parts, "train" (else the first) is trained on, and "validation", "valid", "dev" or "test" validated on. Every rank
    may call it at the same time.

    Args:
        source: a path, a hub name, a `datasets.Dataset`, or several by the name of their part (`datasets.DatasetDict`).
        subset: which configuration of a hub data set.
        sample_by: what is a row of a txt file.
        known: further names that the user may have meant, for the error.

    Raises:
        DataError: there is no such file, its kind is unknown, it cannot be read or has no rows, or the hub does not have it.

    """
    from datasets import Dataset

    if isinstance(source, Dataset):
        return Tables(train=source)
    if isinstance(source, Mapping):
        return _tables(source)
    if not isinstance(source, str | Path):
        raise DataError(
            f"Data comes from a path, a hub name, a datasets.Dataset or a DatasetDict, not from a {type(source).__name__}."
            " What is streamed (an IterableDataset) has no length, and epochs can't be planned: load it without streaming=True."
        )
    name = str(source)
    try:
        with progress_bars(False):
            parts = _read(name, subset, sample_by)
    except DataError:
        raise
    except Exception as error:  # noqa: BLE001 - the library raises a different class for every kind of bad file
        cause = error.__cause__ or error
        if "corresponds to no data" in str(error):
            raise DataError(f"{name}: has no rows.") from error
        raise DataError(f"{name}: could not be loaded.{did_you_mean(name, known)} {type(cause).__name__}: {cause}") from error
    return _tables(parts)


@contextmanager
def progress_bars(enabled: bool) -> Iterator[None]:
    """Show the library's progress bars, or not, inside the block."""
    import datasets

    before = datasets.is_progress_bar_enabled()
    (datasets.enable_progress_bars if enabled else datasets.disable_progress_bars)()
    try:
        yield
    finally:
        (datasets.enable_progress_bars if before else datasets.disable_progress_bars)()


def _tables(parts: Mapping[str, Dataset]) -> Tables:
    if not parts:
        raise DataError("The data set has no parts; it needs one to train on.")
    train = parts.get("train", next(iter(parts.values())))
    validation = next((parts[part] for part in _VALIDATION_NAMES if part in parts and parts[part] is not train), None)
    return Tables(train=train, validation=validation)


def _read(name: str, subset: str | None, sample_by: str) -> Mapping[str, Dataset]:
    import datasets

    path = Path(name).expanduser()
    if path.is_file():
        if not path.read_bytes()[:4096].strip():
            raise DataError(f"{name}: the file is empty.")
        if path.suffix not in _BUILDERS:
            raise DataError(f"{name}: cannot tell what it is. Known endings: {', '.join(_BUILDERS)}.")
        builder, options = _BUILDERS[path.suffix]
        options = {**options, "sample_by": sample_by} if builder == "text" else options
        return dict(datasets.load_dataset(builder, data_files={"train": [str(path)]}, **options))
    if path.is_dir():
        texts = sorted(path.glob("*.txt"))
        if texts:  # left to itself the library makes a row of every line, and a document would fall apart
            return dict(datasets.load_dataset("text", data_files=_parts_of(texts), sample_by=sample_by))
        return dict(datasets.load_dataset(str(path), subset))
    if path.suffix in _BUILDERS or name.startswith(("/", ".", "~")):
        raise DataError(f"{name}: there is no such file or folder.")
    return dict(datasets.load_dataset(name, subset))


def _parts_of(files: Sequence[Path]) -> dict[str, list[str]]:
    """Files by part: by their names if there is a "train.txt", otherwise all to train on."""
    if all(file.stem != "train" for file in files):
        return {"train": [str(file) for file in files]}
    return {file.stem: [str(file)] for file in files if file.stem in ("train", *_VALIDATION_NAMES)}
