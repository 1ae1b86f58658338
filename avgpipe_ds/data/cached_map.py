"""`datasets.map`, done once on a host however many ranks call it, and kept for later runs.

The ranks come one after another, under a file lock: the first does the work, the others find its result in the cache and
map it into memory. What is cached is known by a fingerprint of the table, the tokenizer, the encoder and this package's code.
It is made here because the library's own would change in between: a fast tokenizer remembers how it last truncated, so the
same call has another fingerprint the second time. And the library keeps nothing of tables that are in memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from avgpipe_ds.data.encoding import Rows
from avgpipe_ds.data.tables import progress_bars
from avgpipe_ds.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset, Features

__all__ = ["cached_map"]


def cached_map(
    table: Dataset,
    encoder: Callable[[Rows, list[int]], Rows],
    *,
    tokenizer: Any,
    features: Features,
    description: str,
    progress: bool,
    num_proc: int | None = None,
) -> Dataset:
    """The rows that `encoder` makes of batches of 1,000 of `table`'s.

    Args:
        table: of any format.
        encoder: gets columns and row numbers. Its `repr` says all that the result depends on beside the tokenizer.
        tokenizer: what the encoder uses.
        features: the columns of the result.
        description: for the progress bar.
        progress: whether there is one, in the process that does the work.
        num_proc: processes that do the work. The result is the same for any number.

    Raises:
        DataError: the encoder's, or the cache can't be written.

    """
    import datasets

    table = table.with_format(None)
    fingerprint = datasets.fingerprint.Hasher.hash([table._fingerprint, repr(encoder), _tokenizer_state(tokenizer), _code()])
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "avgpipe_ds"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{fingerprint}.lock").touch()
    except OSError as error:
        raise DataError(f"Tokens are cached in {folder}, which can't be written: {error}. Set HF_DATASETS_CACHE.") from error
    with FileLock(folder / f"{fingerprint}.lock"), progress_bars(progress):
        return table.map(
            encoder,
            with_indices=True,
            batched=True,
            remove_columns=table.column_names,
            features=features,
            num_proc=num_proc,
            cache_file_name=str(folder / f"{fingerprint}.arrow"),
            new_fingerprint=fingerprint,
            desc=description,
        )


def _tokenizer_state(tokenizer: Any) -> Any:
    """All that tokens depend on, but not how the last call truncated and padded."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return tokenizer
    state = json.loads(backend.to_str()) | {"truncation": None, "padding": None}
    options = {name: getattr(tokenizer, name, None) for name in ("chat_template", "truncation_side", "model_input_names")}
    return [type(tokenizer).__qualname__, state, options, dict(tokenizer.special_tokens_map)]


@lru_cache(maxsize=1)
def _code() -> tuple[str, ...]:
    """What makes the tokens: after a change of it, nothing old may be found."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return (*(file.read_text(encoding="utf-8") for file in sources), version("transformers"), version("tokenizers"))
