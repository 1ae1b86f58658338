"""Masked language modelling: which tokens are hidden is drawn anew in every epoch.

The first and the last stage each build their own micro-batches, so both must draw the same. A draw therefore follows from the
seed, the epoch and the number of the sample, and from nothing else; a resumed run draws the same, too. How *many* tokens of a
sample are hidden is fixed when it is tokenised, as in BERT's own pretraining, so that weights can be planned ahead.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, overload

from avgpipe_ds.data.columns import checked_texts
from avgpipe_ds.data.encoding import IGNORED, Limit, Rows
from avgpipe_ds.data.samples import Sample, Samples
from avgpipe_ds.errors import DataError

__all__ = ["MaskableTexts", "MaskedSamples", "Masking"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Masking:
    """How tokens are hidden: of those chosen 80 % become the mask, 10 % a random token, and 10 % stay, as in BERT.

    Attributes:
        mask_token_id: the mask.
        special_ids: tokens that are never chosen.
        vocabulary_size: random tokens are below it.

    """

    mask_token_id: int
    special_ids: frozenset[int]
    vocabulary_size: int

    @classmethod
    def of(cls, tokenizer: Any) -> Masking:
        """The masking of a tokenizer.

        Raises:
            DataError: it has no mask.

        """
        if tokenizer.mask_token_id is None:
            raise DataError(
                "The tokenizer has no mask token, so its model is no masked language model: use the task 'causal-lm'."
            )
        special = frozenset(tokenizer.all_special_ids)
        return cls(mask_token_id=tokenizer.mask_token_id, special_ids=special, vocabulary_size=len(tokenizer))

    def maskable(self, ids: Sequence[int]) -> list[int]:
        """Positions that may be chosen."""
        return [position for position, token in enumerate(ids) if token not in self.special_ids]

    def apply(self, sample: Sample, draw: random.Random) -> Sample:
        """Hide `sample.num_targets` tokens; they are the labels."""
        ids, labels = list(sample.input_ids), [IGNORED] * len(sample.input_ids)
        for position in draw.sample(self.maskable(ids), sample.num_targets):
            labels[position] = ids[position]
            kind = draw.random()
            if kind < 0.8:
                ids[position] = self.mask_token_id
            elif kind < 0.9:
                ids[position] = draw.randrange(self.vocabulary_size)
        return sample._replace(input_ids=ids, labels=labels)


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskableTexts:
    """Encodes texts, and decides how many tokens of each are going to be hidden: `probability` of them, at least one."""

    tokenizer: Any = field(repr=False)
    limit: Limit
    text: str
    probability: float

    def __call__(self, batch: Rows, rows: list[int]) -> Rows:
        """Columns of samples in which nothing is hidden yet."""
        masking = Masking.of(self.tokenizer)
        encoded = self.limit.encode(self.tokenizer, rows, checked_texts(batch[self.text], rows, column=self.text))
        maskable = [len(masking.maskable(ids)) for ids in encoded["input_ids"]]
        for row, count in zip(rows, maskable, strict=True):
            if not count:
                raise DataError(f"row {row}: it has special tokens only, none that could be masked. Remove the row.")
        return {
            "input_ids": encoded["input_ids"],
            "num_targets": [max(1, round(self.probability * count)) for count in maskable],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedSamples(Sequence[Sample]):
    """Samples with some tokens hidden; by default those of one fixed draw, to validate on.

    Attributes:
        samples: with nothing hidden.
        masking: how tokens are hidden.
        draw: what the draw depends on, beside the number of the sample.

    """

    samples: Samples
    masking: Masking
    draw: str = "fixed"

    def in_epoch(self, epoch: int, *, seed: int) -> MaskedSamples:
        """The samples as they are in an epoch."""
        return replace(self, draw=f"{seed}/{epoch}")

    @property
    def lengths(self) -> Sequence[int]:
        """Tokens of every sample."""
        return self.samples.lengths

    @property
    def num_targets(self) -> Sequence[int]:
        """How many tokens of every sample are hidden."""
        return self.samples.num_targets

    def __len__(self) -> int:
        return len(self.samples)

    def select(self, rows: Sequence[int]) -> MaskedSamples:
        """These samples, in this order."""
        return replace(self, samples=self.samples.select(rows))

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> MaskedSamples: ...
    def __getitem__(self, index: int | slice) -> Sample | MaskedSamples:
        if isinstance(index, slice):
            return self.select(range(*index.indices(len(self))))
        number = range(len(self))[index]
        return self.masking.apply(self.samples[number], random.Random(f"{self.draw}/{number}"))
