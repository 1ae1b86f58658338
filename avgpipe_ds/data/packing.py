"""Documents to blocks of equal length: nothing is computed for padding.

Documents are put one behind another, with the end-of-text token between them, and the whole is cut. So a block begins and ends
anywhere, and tokens see those of the documents before theirs in the same block, as in the pretraining of most language models.
(A mask that separates them would have to be three-dimensional; transformers makes one of `position_ids` only if there is no
attention mask, and pipelines always pass one.)
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

from avgpipe_ds.data.encoding import Rows, num_predicted

__all__ = ["Packer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Packer:
    """Cuts a batch of documents into blocks of `max_length` tokens; the last block is as long as it happens to be.

    A left-over without targets is dropped: a single token, or what only the user said.
    """

    max_length: int

    def __call__(self, batch: Rows, rows: list[int]) -> Rows:
        """Columns of blocks; the labels come along where documents have their own."""
        columns = {name: list(chain.from_iterable(batch[name])) for name in ("input_ids", "labels") if name in batch}
        starts = range(0, len(columns["input_ids"]), self.max_length)
        blocks = {name: [tokens[start : start + self.max_length] for start in starts] for name, tokens in columns.items()}
        targets = [num_predicted(labels) for labels in blocks.get("labels", blocks["input_ids"])]
        kept = [number for number, count in enumerate(targets) if count]
        return {name: [parts[number] for number in kept] for name, parts in (blocks | {"num_targets": targets}).items()}
