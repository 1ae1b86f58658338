"""Tokenised samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, overload, runtime_checkable

from avgpipe_ds.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset

__all__ = ["Counted", "DrawnAnew", "Sample", "Samples", "lengths_of", "num_targets_of"]

_ROWS_AT_ONCE = 10_000


class Sample(NamedTuple):
    """One sample.

    Attributes:
        input_ids: its tokens.
        labels: its class, or a number for regression; or a label for every token, which stands where the token stands, -100 for
            none; or None where the tokens are their own labels, as in language modelling.
        num_targets: how many targets its loss sums over: 1 for a class; the labels that something predicts for tokens.
        token_type_ids: which text of a pair a token belongs to; None where there is one text.

    """

    input_ids: Sequence[int]
    labels: int | float | Sequence[int] | None
    num_targets: int
    token_type_ids: Sequence[int] | None = None


@runtime_checkable
class DrawnAnew(Protocol):
    """Samples of which something is drawn anew in every epoch, such as which tokens are masked."""

    def in_epoch(self, epoch: int, *, seed: int) -> Sequence[Sample]:
        """The samples of an epoch: the same wherever and whenever it is asked for."""


@runtime_checkable
class Counted(Protocol):
    """Samples that can be counted without looking at each."""

    @property
    def lengths(self) -> Sequence[int]:
        """Tokens of every sample."""

    @property
    def num_targets(self) -> Sequence[int]:
        """Targets of every sample."""


class Samples(Sequence[Sample]):
    """Samples in an Arrow table, which stays on disk: a sample becomes Python objects when it is asked for.

    Args:
        table: with the columns `input_ids` and `num_targets`, and where there are any `labels` and `token_type_ids`.

    """

    def __init__(self, table: Dataset) -> None:
        self.table = table.with_format(None)

    def __len__(self) -> int:
        return len(self.table)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> Samples: ...
    def __getitem__(self, index: int | slice) -> Sample | Samples:
        if isinstance(index, slice):
            return self.select(range(*index.indices(len(self))))
        return _sample(self.table[index])

    def __iter__(self) -> Iterator[Sample]:
        for rows in self.table.iter(batch_size=_ROWS_AT_ONCE):
            yield from (_sample(dict(zip(rows, values, strict=True))) for values in zip(*rows.values(), strict=True))

    def select(self, rows: Sequence[int]) -> Samples:
        """These samples, in this order."""
        return Samples(self.table.select(rows))

    @cached_property
    def lengths(self) -> Sequence[int]:
        """Tokens of every sample."""
        import pyarrow.compute as pc  # type: ignore[import-untyped]

        table = self.table.select_columns(["input_ids"]).with_format("arrow")
        return [
            length
            for rows in table.iter(batch_size=_ROWS_AT_ONCE)
            for length in pc.list_value_length(rows["input_ids"]).to_pylist()
        ]

    @cached_property
    def num_targets(self) -> Sequence[int]:
        """Targets of every sample."""
        return list(self.table.select_columns(["num_targets"])[:]["num_targets"])


def lengths_of(samples: Sequence[Sample]) -> Sequence[int]:
    """Tokens of every sample."""
    return samples.lengths if isinstance(samples, Counted) else [len(sample.input_ids) for sample in samples]


def num_targets_of(samples: Sequence[Sample]) -> Sequence[int]:
    """Targets of every sample.

    Raises:
        DataError: a sample has none, so there is nothing to train or to judge.

    """
    counts = samples.num_targets if isinstance(samples, Counted) else [sample.num_targets for sample in samples]
    for number, count in enumerate(counts):
        if count < 1:
            raise DataError(f"Sample {number} has no target, so nothing can be trained on it: leave it out.")
    return counts


def _sample(row: dict[str, Any]) -> Sample:
    return Sample(row["input_ids"], row.get("labels"), row["num_targets"], row.get("token_type_ids"))
