"""What encoders have in common: they make columns of tokens of columns of whatever a row holds, a batch of rows at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from avgpipe_ds.errors import DataError

__all__ = ["IGNORED", "Encoder", "Limit", "Rows", "num_predicted"]

#: What the loss leaves out, as everywhere in PyTorch and transformers.
IGNORED = -100

Rows = dict[str, list[Any]]
"""Columns by name, for a batch of rows."""


class Encoder(Protocol):
    """Makes tokens of a batch of rows. Its `repr` says all that the result depends on, but for the tokenizer."""

    def __call__(self, batch: Rows, rows: list[int]) -> Rows:
        """Columns of samples; `rows` are the numbers of the rows, for errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """How long a sample may be, in tokens, and what happens to a longer one: its end is cut off, or it is an error."""

    max_length: int | None
    truncate: bool

    def encode(self, tokenizer: Any, rows: Sequence[int], *texts: Any, **options: Any) -> Any:
        """What `tokenizer` makes of the texts (and second texts) of the rows.

        Raises:
            DataError: a row is too long, or nothing is left of it.

        """
        if self.truncate and self.max_length is not None:
            options |= {"truncation": True, "max_length": self.max_length}
        # verbose=False: what is too long for the model is an error here, so no warning is needed.
        encoded = tokenizer(*texts, verbose=False, **options)
        for row, ids in zip(rows, encoded["input_ids"], strict=True):
            self.check(ids, row)
        return encoded

    def cut(self, ids: list[int], row: int) -> list[int]:
        """The tokens of a row, as many as it may have.

        Raises:
            DataError: these are too many, or none.

        """
        self.check(ids[: self.max_length] if self.truncate else ids, row)
        return ids[: self.max_length]

    def check(self, ids: Sequence[int], row: int) -> None:
        """Refuse a row that has no tokens, or more than it may have."""
        if not ids:
            raise DataError(f"row {row}: the tokenizer makes no token of it. Remove the row.")
        if self.max_length is not None and len(ids) > self.max_length:
            raise DataError(
                f"row {row}: {len(ids)} tokens, and max_length is {self.max_length}. Pass truncate=True to cut off what is"
                " longer, or remove the row."
            )


def num_predicted(labels: Sequence[int]) -> int:
    """How many of a language model's labels something predicts: all but the ignored ones and the first."""
    return sum(label != IGNORED for label in labels[1:])
