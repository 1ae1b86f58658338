"""Outputs of micro-batches put back into the order of the samples; metrics of the `evaluate` library."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from avgpipe_ds.evaluating.metrics import checked_scores, load_metrics
from avgpipe_ds.evaluating.predictions import Chunk, Place, in_order


def chunk(places: list[Place], outputs: Any, labels: Any = None) -> Chunk:
    return Chunk.of(places, outputs, torch.arange(len(places)) if labels is None else labels)


def test_rows_of_one_shape_are_an_array() -> None:
    chunks = [
        chunk([(0, 3), None, (0, 0)], torch.tensor([[3.0], [9.0], [0.0]], dtype=torch.bfloat16), torch.tensor([3, 9, 0])),
        chunk([(0, 1)], torch.tensor([[1.0]], dtype=torch.bfloat16), torch.tensor([1])),
    ]
    predictions, labels = in_order(chunks)
    assert predictions.dtype == np.float32 and predictions.tolist() == [[0], [1], [3]]
    assert labels.dtype == np.int64 and labels.tolist() == [0, 1, 3]


def test_replicas_come_one_after_the_other() -> None:
    predictions, _ = in_order([chunk([(1, 0)], torch.tensor([10])), chunk([(0, 1), (0, 0)], torch.tensor([1, 0]))])
    assert predictions.tolist() == [0, 1, 10]


def test_rows_of_different_shapes_are_a_list_and_tuples_stay_tuples() -> None:
    chunks = [
        chunk([(0, 1)], (torch.ones(1, 4), torch.tensor([1])), torch.ones(1, 4)),
        chunk([(0, 0)], (torch.zeros(1, 2), torch.tensor([0])), torch.zeros(1, 2)),
    ]
    (logits, classes), labels = in_order(chunks)
    assert [row.tolist() for row in logits] == [[0, 0], [1, 1, 1, 1]] and classes.tolist() == [0, 1]
    assert [row.shape for row in labels] == [(2,), (4,)]


def test_what_is_kept_is_a_copy_on_the_host() -> None:
    outputs = torch.zeros(1, 2, 3, requires_grad=True)
    (kept,) = chunk([(0, 0)], outputs[:, -1]).outputs
    outputs.data.fill_(1)
    assert kept.tolist() == [[0, 0, 0]] and kept.base is None  # not a view that keeps the whole tensor


@pytest.mark.parametrize(
    ("chunks", "text"),
    [
        ([chunk([(0, 4)], torch.ones(1)), chunk([(0, 4)], torch.ones(1))], "sample 4 came twice: give None"),
        ([chunk([None], torch.ones(1))], "at least one sample"),
        ([chunk([(0, 0)], torch.ones(1)), chunk([(0, 1)], (torch.ones(1),))], "same number of outputs and labels"),
    ],
)
def test_what_can_not_be_put_in_order(chunks: list[Chunk], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        in_order(chunks)


def test_rows_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"metrics need outputs with one row per sample, \[2, ...\] here, got \[3, 5\]"):
        chunk([(0, 0), (0, 1)], torch.ones(3, 5))
    with pytest.raises(TypeError, match="metrics need the labels as a tensor or a tuple of tensors, got a str"):
        chunk([(0, 0)], torch.ones(1), "good")


def test_numbers_of_any_kind() -> None:
    numbers = {"a": 1, "b": np.float32(2), "c": torch.tensor([3.0]), "d": np.array(4), "e": True}
    assert checked_scores(numbers) == {"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0, "e": 1.0}
    assert all(type(value) is float for value in checked_scores(numbers).values())
    for wrong in (np.ones(2), "much", None, torch.ones(2)):
        with pytest.raises(ValueError, match="metrics must return numbers, but 'a' is a "):
            checked_scores({"a": wrong})


def test_named_metrics_are_loaded_and_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str, **options: Any) -> Any:
        if name == "unknown":
            raise FileNotFoundError("no hub")
        return SimpleNamespace(compute=lambda predictions, references: {name: (predictions, references)})

    monkeypatch.setitem(sys.modules, "evaluate", SimpleNamespace(load=load))
    assert load_metrics(["f1", "recall"])(1, 2) == {"f1": (1, 2), "recall": (1, 2)}
    with pytest.raises(ValueError, match="can't load the metric 'unknown': FileNotFoundError: no hub. A folder"):
        load_metrics(["f1", "unknown"])
    monkeypatch.setitem(sys.modules, "evaluate", None)
    with pytest.raises(ImportError, match=r"which is not installed: pip install 'avgpipe-ds\[evaluate\]', or pass a function"):
        load_metrics(["f1"])


def test_a_metric_of_the_library_from_a_folder(tmp_path: Path) -> None:
    pytest.importorskip("evaluate")
    from tests.distributed.test_evaluate_dataset import METRIC

    (tmp_path / "distance").mkdir()
    (tmp_path / "distance" / "distance.py").write_text(METRIC)
    metrics = load_metrics([str(tmp_path / "distance")])
    assert metrics(np.zeros((2, 3)), np.full((2, 3), 0.5)) == {"distance": 0.5}
