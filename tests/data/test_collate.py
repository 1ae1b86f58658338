import torch

from avgpipe_ds.data import Collate, Sample

COLLATE = Collate(pad_token_id=0, max_length=20)


def test_classes():
    (ids, mask), (labels, weight) = COLLATE([Sample([5, 6, 7], 2, 1), Sample([8] * 9, 0, 1)], [0.5, 0.0])
    assert ids.shape == mask.shape == (2, 16)
    assert ids.dtype == mask.dtype == labels.dtype == torch.int64
    assert weight.dtype == torch.float32
    assert ids[0].tolist() == [5, 6, 7] + [0] * 13
    assert mask.sum(dim=1).tolist() == [3, 9]
    assert labels.tolist() == [2, 0]
    assert weight.tolist() == [0.5, 0.0]


def test_tokens_and_length_limit():
    (ids, mask), (labels, _) = COLLATE([Sample([5] * 19, None, 18), Sample([6, 7], None, 1)], [1.0, 1.0])
    assert ids.shape == (2, 20)  # 24 would be the next multiple of 8, but no position lies behind 20
    assert labels[1].tolist() == [6, 7] + [-100] * 18
    assert torch.equal(labels[mask == 1], ids[mask == 1])


def test_numbers():
    _, (labels, _) = COLLATE([Sample([5], 0.5, 1), Sample([6], -2.0, 1)], [1.0, 1.0])
    assert labels.dtype == torch.float32
    assert labels.tolist() == [0.5, -2.0]


def test_left():
    collate = Collate(pad_token_id=9, padding_side="left", multiple_of=4)
    samples = [Sample([5, 6], [-100, 6], 1, [0, 1]), Sample([1, 2, 3], [1, 2, -100], 1, [0, 1, 1])]
    (ids, mask, types), (labels, _) = collate(samples, [1, 1])
    assert ids.tolist() == [[9, 9, 5, 6], [9, 1, 2, 3]]
    assert mask.tolist() == [[0, 0, 1, 1], [0, 1, 1, 1]]
    assert types.tolist() == [[0, 0, 0, 1], [0, 0, 1, 1]]
    assert labels.tolist() == [[-100, -100, -100, 6], [-100, 1, 2, -100]]


def test_what_the_tokenizer_says(byte_tokenizer):
    collate = Collate.of(byte_tokenizer("eos_token", "pad_token", padding_side="left", model_max_length=5))
    assert (collate.pad_token_id, collate.max_length, collate.padding_side) == (257, 5, "left")
    assert Collate.of(byte_tokenizer("eos_token"), max_length=7) == Collate(pad_token_id=0, max_length=7)
