"""Token classification: lists of words with a tag each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from avgpipe_ds.data.encoding import IGNORED, Limit, Rows
from avgpipe_ds.data.labels import Classes
from avgpipe_ds.errors import DataError

__all__ = ["TaggedWords"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedWords:
    """Words with a tag each. A word's first token has its tag; its other tokens and special tokens have none."""

    tokenizer: Any = field(repr=False)
    limit: Limit
    words: str
    tags: str
    classes: Classes

    def __call__(self, batch: Rows, rows: list[int]) -> Rows:
        """Columns of samples with a label for every token."""
        for row, words, tags in zip(rows, batch[self.words], batch[self.tags], strict=True):
            self._check(row, words, tags)
        encoded = self.limit.encode(self.tokenizer, rows, batch[self.words], is_split_into_words=True)
        labels = [self._align(encoded.word_ids(index), tags) for index, tags in enumerate(batch[self.tags])]
        num_targets = [sum(label != IGNORED for label in row) for row in labels]
        for row, targets in zip(rows, num_targets, strict=True):
            if not targets:
                raise DataError(f"row {row}: no word of it has a token. Remove the row.")
        return {"input_ids": encoded["input_ids"], "labels": labels, "num_targets": num_targets}

    def _align(self, words: list[int | None], tags: list[Any]) -> list[int]:
        before = [None, *words]
        return [
            IGNORED if word is None or word == previous else self.classes.ids[tags[word]]
            for word, previous in zip(words, before, strict=False)
        ]

    def _check(self, row: int, words: Any, tags: Any) -> None:
        for column, values in ((self.words, words), (self.tags, tags)):
            if not isinstance(values, list) or not values:
                raise DataError(
                    f"row {row}: column {column!r} must hold a list with something in it, but holds {values!r} there."
                )
        if len(words) != len(tags):
            raise DataError(
                f"row {row}: {len(words)} words in {self.words!r}, but {len(tags)} tags in {self.tags!r}; each needs one."
            )
        if not all(isinstance(word, str) for word in words):
            raise DataError(f"row {row}: column {self.words!r} must hold words, but holds {words!r} there.")
