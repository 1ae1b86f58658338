"""Micro-batches as the engine takes them: `((input_ids, attention_mask), (labels, weight))`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from avgpipe_ds.data.encoding import IGNORED
from avgpipe_ds.data.samples import Sample

__all__ = ["Collate", "MicroBatch"]

MicroBatch = tuple[tuple[Tensor, ...], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Collate:
    """Makes tensors of samples, padded to the longest of them.

    The length is rounded up to a multiple of 8, which matrix units like and which keeps the number of different shapes
    small, but never above `max_length`: the model may have no position behind it.

    Attributes:
        pad_token_id: what is padded with; any will do, since it is masked.
        max_length: the longest that micro-batches may become by rounding up; None for any.
        padding_side: where padding goes.
        multiple_of: what lengths are rounded up to.

    """

    pad_token_id: int
    max_length: int | None = None
    padding_side: Literal["left", "right"] = "right"
    multiple_of: int = 8

    @classmethod
    def of(cls, tokenizer: Any, *, max_length: int | None = None) -> Collate:
        """Pad as a tokenizer says. `max_length` as for `tokenise`."""
        # A model without a padding token (GPT-2, Llama) never sees one either: padding is masked.
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
        longest = tokenizer.model_max_length if max_length is None else max_length
        return cls(pad_token_id=pad, max_length=longest, padding_side=tokenizer.padding_side)

    def __call__(self, samples: Sequence[Sample], weights: Sequence[float]) -> MicroBatch:
        """Return the tensors of one micro-batch.

        `input_ids` and `attention_mask` are int64 [batch, length], and so are `token_type_ids` behind them, if samples have any.
        Labels are int64: classes [batch] (numbers are fp32), or tokens [batch, length] that stand where the inputs stand (the
        loss shifts them), -100 on padding. Weights are fp32 [batch].
        """
        length = self._length(max(len(sample.input_ids) for sample in samples))
        input_ids = self._padded([sample.input_ids for sample in samples], length, self.pad_token_id)
        attention_mask = self._padded([[1] * len(sample.input_ids) for sample in samples], length, 0)
        inputs: tuple[Tensor, ...] = (input_ids, attention_mask)
        types = [sample.token_type_ids for sample in samples if sample.token_type_ids is not None]
        if types:
            inputs = (*inputs, self._padded(types, length, 0))
        return inputs, (self._labels(samples, length), torch.tensor(weights, dtype=torch.float32))

    def _labels(self, samples: Sequence[Sample], length: int) -> Tensor:
        values = [sample.labels for sample in samples if isinstance(sample.labels, int | float)]
        if values:
            return torch.tensor(values)
        tokens = [sample.input_ids if sample.labels is None else sample.labels for sample in samples]
        return self._padded([labels for labels in tokens if not isinstance(labels, int | float)], length, IGNORED)

    def _length(self, longest: int) -> int:
        rounded = -(-longest // self.multiple_of) * self.multiple_of
        return rounded if self.max_length is None else max(longest, min(rounded, self.max_length))

    def _padded(self, rows: Sequence[Sequence[int]], length: int, value: int) -> Tensor:
        """Int64 [rows, length]."""
        padded = torch.full((len(rows), length), value, dtype=torch.int64)
        for row, tokens in enumerate(rows):
            where = slice(length - len(tokens), length) if self.padding_side == "left" else slice(len(tokens))
            padded[row, where] = torch.tensor(tokens, dtype=torch.int64)
        return padded
