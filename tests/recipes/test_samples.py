import pytest
from common.corpus import LabelledTexts
from common.errors import RecipeError
from common.samples import blocks_of_text, hold_out_tail, labelled_samples
from common.splits import hold_out, hold_out_groups, thinned
from hypothesis import given
from hypothesis import strategies as st


class Letters:
    """A tokenizer that makes a token of every letter."""

    eos_token_id = 0

    def __call__(self, texts, truncation=False, max_length=None, **_):
        return {"input_ids": [[ord(letter) for letter in text][: max_length if truncation else None] for text in texts]}


def test_labelled_samples():
    samples = labelled_samples(LabelledTexts(texts=["abc", "de"], labels=[1, 0]), Letters(), max_length=2)
    assert samples == [([97, 98], 1, 1), ([100, 101], 0, 1)]


def test_a_text_without_tokens():
    with pytest.raises(RecipeError, match="makes nothing of row 1"):
        labelled_samples(LabelledTexts(texts=["a", ""], labels=[0, 1]), Letters(), max_length=4)


def test_blocks_join_documents_and_keep_the_rest():
    blocks = blocks_of_text(["abc", "de"], Letters(), max_length=5)
    assert [list(block.input_ids) for block in blocks] == [[97, 98, 99, 0, 100], [101, 0]]
    assert [block.num_targets for block in blocks] == [4, 1]
    assert len(blocks_of_text(["abcd", "fghi", ""], Letters(), max_length=5)) == 2  # a single token predicts nothing


def test_tail():
    assert hold_out_tail(list(range(10)), 0.2) == (list(range(8)), [8, 9])
    assert hold_out_tail([1, 2], 0.01) == ([1], [2])
    assert hold_out_tail([1], 0.5) == ([1], [])


@given(st.lists(st.integers(0, 3), min_size=2, max_size=60), st.floats(0.01, 0.9))
def test_hold_out_divides_and_leaves_every_class_in_training(labels, fraction):
    train, validation = hold_out(labels, fraction)
    assert sorted(train + validation) == list(range(len(labels)))
    assert validation
    if len(set(labels)) < len(labels) and all(labels.count(label) > 1 for label in labels):
        assert {labels[row] for row in train} == set(labels)


@given(st.lists(st.sampled_from("abcdef"), max_size=40))
def test_groups_stay_together(groups):
    train, validation = hold_out_groups(groups, 0.4)
    assert sorted(train + validation) == list(range(len(groups)))
    assert not {groups[row] for row in train} & {groups[row] for row in validation}


def test_thinned():
    assert thinned([1, 2, 3], None) == thinned([1, 2, 3], 7) == [1, 2, 3]
    assert thinned(range(100), 5) == sorted(thinned(range(100), 5))
