"""Pure choices of which rows are held out for validation.

They depend on the data alone, not on `--seed`: runs that differ in their training seed validate on the same samples.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import TypeVar

__all__ = ["Split", "hold_out", "hold_out_groups", "hold_out_tail", "thinned"]

Row = TypeVar("Row")

_FIXED_SEED = 0

#: Row numbers for training, and row numbers for validation; both sorted.
Split = tuple[list[int], list[int]]


def hold_out(labels: Sequence[Hashable], fraction: float) -> Split:
    """Hold out `fraction` of the rows of every label (stratified); a label with a single row stays in training."""
    rows_of: dict[Hashable, list[int]] = defaultdict(list)
    for row, label in enumerate(labels):
        rows_of[label].append(row)
    generator = random.Random(_FIXED_SEED)
    validation: set[int] = set()
    for rows in rows_of.values():  # a dict keeps the order of first appearance: the same on every rank
        generator.shuffle(rows)
        validation.update(rows[: min(round(fraction * len(rows)), len(rows) - 1)])
    if not validation and len(labels) > 1:
        # Too few rows for the fraction to hold out anything, but a run without validation cannot be judged.
        validation.add(generator.randrange(len(labels)))
    return _split(len(labels), validation)


def hold_out_groups(groups: Sequence[Hashable], fraction: float) -> Split:
    """Hold out `fraction` of the groups with all their rows, so that no group is on both sides."""
    distinct = list(dict.fromkeys(groups))
    random.Random(_FIXED_SEED).shuffle(distinct)
    held_out = set(distinct[: round(fraction * len(distinct))])
    return _split(len(groups), {row for row, group in enumerate(groups) if group in held_out})


def hold_out_tail(num_rows: int, fraction: float) -> Split:
    """Hold out the last `fraction` of the rows, at least one where there are two; running text has no other fair cut."""
    num_held_out = min(max(round(fraction * num_rows), 1), num_rows - 1)
    return list(range(num_rows - num_held_out)), list(range(num_rows - num_held_out, num_rows))


def thinned(rows: Sequence[Row], at_most: int | None) -> list[Row]:
    """Keep `at_most` rows, drawn at random, in their order; all of them for None."""
    if at_most is None or at_most >= len(rows):
        return list(rows)
    return [rows[row] for row in sorted(random.Random(_FIXED_SEED).sample(range(len(rows)), at_most))]


def _split(num_rows: int, validation: set[int]) -> Split:
    return [row for row in range(num_rows) if row not in validation], sorted(validation)
