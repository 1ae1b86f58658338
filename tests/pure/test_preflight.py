"""What a check looks for in data and graphs, and how it is told; no processes."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from avgpipe_ds.errors import AvgPipeError
from avgpipe_ds.preflight.__main__ import checking
from avgpipe_ds.preflight.data import attended_padding, impossible_classes, lost_samples
from avgpipe_ds.preflight.graph import nodes_of, reaches
from avgpipe_ds.preflight.names import common_path
from avgpipe_ds.preflight.report import Comparison, LayerRow, PreflightError, Problem, Report, Value
from avgpipe_ds.preflight.table import as_text, verdict

LOGITS = torch.zeros(3, 4, 5)


@pytest.mark.parametrize(
    ("labels", "found"),
    [
        (torch.tensor([[0, 1, 2, 4]] * 3), None),
        (torch.tensor([[0, 1, -100, 4]] * 3), None),
        (torch.tensor([[0, 5, -100, 4]] * 3), "labels from 5 to 5, but the model has the classes 0 to 4"),
        (torch.tensor([[0, 1, -1, 9]] * 3), "labels from -1 to 9"),
        ((torch.tensor([[0, 1, 2, 9]] * 3), torch.ones(3)), "labels from 9 to 9"),
        (torch.tensor([9.0, 9.0, 9.0]), None),
        (torch.full((3, 4, 5), 9), None),
        (None, None),
        ((), None),
    ],
)
def test_impossible_classes(labels: Any, found: str | None) -> None:
    text = impossible_classes(LOGITS, labels)
    assert text is None if found is None else text is not None and text.startswith(found)


@pytest.mark.parametrize("outputs", [torch.zeros(3, 1), torch.zeros(3, 5, dtype=torch.int64), torch.zeros(()), (LOGITS,)])
def test_outputs_that_are_no_classes(outputs: Any) -> None:
    assert impossible_classes(outputs, torch.tensor([9, 9, 9])) is None


CONFIG = SimpleNamespace(pad_token_id=0, eos_token_id=2, bos_token_id=None)


@pytest.mark.parametrize(
    ("ids", "mask", "number"),
    [
        ([[5, 6, 0], [5, 0, 0]], [[1, 1, 0], [1, 0, 0]], 0),
        ([[5, 6, 0], [5, 0, 0]], [[1, 1, 1], [1, 1, 1]], 2),
        ([[0, 0, 5], [5, 5, 5]], [[1, 1, 1], [1, 1, 1]], 1),
        ([[0, 0, 5], [5, 5, 5]], [[0, 0, 1], [1, 1, 1]], 0),
        ([[5, 0, 5], [5, 5, 5]], [[1, 1, 1], [1, 1, 1]], 0),
    ],
)
def test_attended_padding(ids: list[list[int]], mask: list[list[int]], number: int) -> None:
    text = attended_padding((torch.tensor(ids), torch.tensor(mask)), CONFIG)
    assert text is None if number == 0 else text is not None and text.startswith(f"{number} of 2 samples")


@pytest.mark.parametrize(
    "config",
    [
        SimpleNamespace(pad_token_id=None),
        SimpleNamespace(pad_token_id=0, eos_token_id=0),
        SimpleNamespace(pad_token_id=0, eos_token_id=[0, 1]),
    ],
)
def test_a_padding_token_that_is_none_says_nothing(config: Any) -> None:
    assert attended_padding((torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, 3, dtype=torch.int64)), config) is None


@pytest.mark.parametrize(
    ("comes", "goes", "lost"),
    [
        ((4, 7), (4, 7, 16), False),
        ((4, 7), (7, 4, 16), False),
        ((4, 7), (28, 16), False),
        ((4, 7), (7, 16), True),
        ((4, 7), (), True),
        ((5, 7), (7, 16), False),
    ],
)
def test_lost_samples(comes: tuple[int, ...], goes: tuple[int, ...], lost: bool) -> None:
    mask = torch.ones(7)
    assert lost_samples(4, (torch.zeros(comes), mask), (torch.zeros(goes),)) is lost


def test_a_gradient_finds_its_way_through_what_depends() -> None:
    leaf, weight = torch.ones(3, requires_grad=True), nn.Parameter(torch.ones(3))
    came = (leaf * 2).sin()
    wanted = nodes_of([came, 5])
    assert reaches([came * weight], wanted)
    assert reaches([came], wanted)
    assert reaches([weight, {"not": "a tensor"}, came.relu_()], wanted), "also where it works in place"
    assert not reaches([came.detach() * weight], wanted)
    assert not reaches([leaf * weight], wanted), "before what came is not behind it"
    assert reaches([leaf * weight], nodes_of([leaf]))
    assert not reaches([torch.ones(3)], wanted) and nodes_of([torch.ones(3)]) == set()


@pytest.mark.parametrize(
    ("names", "path"),
    [
        (["bert.encoder.layer.1.output.dense.bias", "bert.encoder.layer.1.attention.self.key.weight"], "bert.encoder.layer.1"),
        (["transformer.wte.weight"], "transformer.wte"),
        (["bert.pooler.dense.weight", "bert.pooler.dense.bias", "classifier.weight"], "bert, classifier"),
        ([], ""),
    ],
)
def test_common_path(names: list[str], path: str) -> None:
    assert common_path(names) == path


ROW = LayerRow(
    stage_id=1,
    number=3,
    name="Block",
    path="bert.encoder.layer.1",
    inputs=(Value.of(torch.zeros(2, 3)), Value.of(object())),
    outputs=(Value.of(torch.zeros(2, 3, dtype=torch.bfloat16, requires_grad=True)),),
    trainable=12345,
    seconds=0.0021,
)
REPORT = Report(
    rows=(ROW,),
    problems=(
        Problem(severity="error", where="loss", text="it is [nan]"),
        Problem(severity="warning", where="stage 0", text="nothing to train"),
    ),
    loss=math.nan,
)


def test_a_report_survives_its_file(tmp_path: Any) -> None:
    REPORT.save(tmp_path / "report.json")
    again = Report.load(tmp_path / "report.json")
    assert again.loss is not None and math.isnan(again.loss)
    assert (again.rows, again.problems) == (REPORT.rows, REPORT.problems)
    (tmp_path / "other.json").write_text('{"rows": 1}')
    with pytest.raises(AvgPipeError, match="other.json is no report of a check"):
        Report.load(tmp_path / "other.json")


def test_what_users_read() -> None:
    text = as_text(REPORT)
    for part in ("Block", "bert.encoder.layer.1", "float32[2, 3]", "object", "bfloat16[2, 3]*", "12,345", "2.1"):
        assert part in text, part
    assert "error loss: it is [nan]" in text and "warning stage 0: nothing to train" in text
    assert verdict(REPORT) == "failed: 1 error(s), 1 warning(s)" and verdict(Report(rows=(), problems=())).startswith("passed")


def test_layers_that_look_alike_are_one_line() -> None:
    """As the blocks of a large model do, on each stage by themselves."""
    blocks = [replace(ROW, number=number, path=f"h.{number}", stage_id=number // 4) for number in range(8)]
    other = replace(ROW, number=8, trainable=1, path="head")
    lines = [line for line in as_text(Report(rows=(*blocks, other), problems=())).splitlines() if "Block" in line]
    assert [line.split("│")[2].strip() for line in lines] == ["0 - 3", "4 - 7", "8"]
    assert [line.split("│")[-2].strip() for line in lines] == ["8.4", "8.4", "2.1"]


def test_the_error_has_the_report_and_crosses_processes() -> None:
    error = pickle.loads(pickle.dumps(PreflightError(REPORT)))
    assert str(error) == "the check before training found 1 error(s):\n  loss: it is [nan]"
    assert error.report.errors == REPORT.errors


@pytest.mark.parametrize(
    ("loss", "norm", "tolerance", "same"),
    [
        (2.0, 3.0, 1e-4, True),
        (2.0001, 3.0, 1e-4, True),
        (2.001, 3.0, 1e-4, False),
        (2.0, 3.01, 1e-4, False),
        (2.0, 3.01, None, True),
        (math.nan, 3.0, 1e-4, False),
    ],
)
def test_comparison(loss: float, norm: float, tolerance: float | None, same: bool) -> None:
    assert Comparison(loss=loss, whole_loss=2.0, norm=norm, whole_norm=3.0, tolerance=tolerance).same is same


def test_a_configuration_to_check(tmp_path: Any) -> None:
    block = {"num_pipelines": 2, "trace": "timelines", "tuning": {"profile": "p.json", "iterations": 3}, "preflight": True}
    config = {"train_batch_size": 8, "wandb": {"enabled": True}, "avgpipe": block}
    assert checking(config, tmp_path / "r") == {
        "train_batch_size": 8,
        "avgpipe": {"num_pipelines": 2, "tuning": {"iterations": 3}, "preflight": str(tmp_path / "r")},
    }
    assert checking({}, tmp_path / "r") == {"avgpipe": {"preflight": str(tmp_path / "r")}}
