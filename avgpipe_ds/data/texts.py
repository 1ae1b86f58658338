"""Encoders of text: with a class, as a language model's sample, as a document to be packed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from avgpipe_ds.data.columns import checked_texts
from avgpipe_ds.data.encoding import Limit, Rows
from avgpipe_ds.data.labels import Classes
from avgpipe_ds.errors import DataError

__all__ = ["ClassifiedTexts", "Documents", "Texts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifiedTexts:
    """A text, or a pair of texts, with a class.

    Attributes:
        tokenizer: of the model.
        limit: of the tokens of a text, or of both together.
        texts: one column, or two.
        token_types: whether the model is told which text a token belongs to.
        label: the column with the class.
        classes: ids of labels.

    """

    tokenizer: Any = field(repr=False)
    limit: Limit
    texts: tuple[str, ...]
    token_types: bool
    label: str
    classes: Classes

    def __call__(self, batch: Rows, rows: list[int]) -> Rows:
        """Columns of samples with a class."""
        texts = [checked_texts(batch[column], rows, column=column) for column in self.texts]
        encoded = self.limit.encode(self.tokenizer, rows, *texts)
        labels = [self.classes.ids[label] for label in batch[self.label]]
        made: Rows = {"input_ids": encoded["input_ids"], "labels": labels, "num_targets": [1] * len(rows)}
        if self.token_types:
            made["token_type_ids"] = encoded["token_type_ids"]
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """A text whose tokens are predicted one after another. It ends with the end-of-text token, unless that is cut off."""

    tokenizer: Any = field(repr=False)
    limit: Limit
    text: str

    def __call__(self, batch: Rows, rows: list[int]) -> Rows:
        """Columns of samples whose tokens are their labels."""
        texts = checked_texts(batch[self.text], rows, column=self.text)
        end = self.tokenizer.eos_token_id
        made = []
        for row, ids in zip(rows, self.tokenizer(texts, verbose=False)["input_ids"], strict=True):
            whole = ids if end is None or ids[-1:] == [end] else [*ids, end]
            made.append(self.limit.cut(whole, row))
            if len(made[-1]) < 2:
                raise DataError(f"row {row}: a single token, after which there is nothing to predict. Remove the row.")
        return {"input_ids": made, "num_targets": [len(ids) - 1 for ids in made]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Documents:
    """Documents to be packed: tokens with the end-of-text token behind them, however many; nothing for an empty document."""

    tokenizer: Any = field(repr=False)
    text: str

    def __call__(self, batch: Rows, rows: list[int]) -> Rows:
        """Columns of documents; fewer than rows where some are empty."""
        end = [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]
        documents = []
        for row, text in zip(rows, batch[self.text], strict=True):
            if text is not None and not isinstance(text, str):
                raise DataError(f"row {row}: column {self.text!r} must hold text, but holds {text!r} there.")
            if text:
                documents.append(text)
        # verbose=False: a whole document is longer than the model's positions, which is why it is cut into blocks.
        encoded = self.tokenizer(documents, add_special_tokens=False, verbose=False)["input_ids"] if documents else []
        return {"input_ids": [[*ids, *end] for ids in encoded]}
