"""Tokenised samples."""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

from common.corpus import LabelledTexts
from common.errors import RecipeError

__all__ = ["Sample", "blocks_of_text", "hold_out_tail", "labelled_samples"]


class Sample(NamedTuple):
    """One sample: its token ids, its class (None for language modelling) and the number of targets its loss sums over."""

    input_ids: Sequence[int]
    label: int | None
    num_targets: int


def labelled_samples(texts: LabelledTexts, tokenizer: Any, *, max_length: int) -> list[Sample]:
    """Tokenise texts with a class each; a text longer than `max_length` tokens keeps its beginning."""
    if not texts.texts:
        return []
    encoded = tokenizer(list(texts.texts), truncation=True, max_length=max_length)["input_ids"]
    for row, ids in enumerate(encoded):
        if not ids:
            raise RecipeError(f"The tokenizer makes nothing of row {row}: {texts.texts[row]!r}.")
    return [Sample(ids, label, 1) for ids, label in zip(encoded, texts.labels, strict=True)]


def blocks_of_text(documents: Iterable[str], tokenizer: Any, *, max_length: int) -> list[Sample]:
    """Tokenise documents, join them with the end-of-text token, and cut the whole into blocks of `max_length` tokens.

    The last block is as long as it happens to be; a single left-over token has nothing to predict and is dropped.
    """
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    # verbose=False: a whole document is longer than the model's positions, which is why it is cut into blocks here.
    encoded = tokenizer(list(documents), add_special_tokens=False, verbose=False)["input_ids"]
    tokens = list(chain.from_iterable([*ids, *end] for ids in encoded))
    blocks = (tokens[start : start + max_length] for start in range(0, len(tokens), max_length))
    return [Sample(block, None, len(block) - 1) for block in blocks if len(block) > 1]


def hold_out_tail(samples: Sequence[Sample], fraction: float) -> tuple[list[Sample], list[Sample]]:
    """Hold out the last `fraction` of the samples, at least one where there are two; running text has no other fair cut."""
    num_held_out = min(max(round(fraction * len(samples)), 1), len(samples) - 1)
    cut = len(samples) - num_held_out
    return list(samples[:cut]), list(samples[cut:])
