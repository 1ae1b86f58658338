"""The check of Hugging Face models: names of transformers, its data, and the comparison with its own model."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from avgpipe_ds.preflight import Report
from tests.distributed.world import World

VOCABULARY, POSITIONS, LABELS = 61, 24, 5
SIZES = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def bert(**options: Any) -> Any:
    from transformers import BertConfig

    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
    return BertConfig(**(SIZES | sizes | {"max_position_embeddings": POSITIONS, "num_labels": LABELS} | options))


def gpt2() -> Any:
    from transformers import GPT2Config

    return GPT2Config(**SIZES, n_embd=32, n_layer=3, n_head=4, n_positions=POSITIONS)


@dataclass(frozen=True)
class Batch:
    """A micro-batch; two of its four samples are padded."""

    length: int = 11
    padding: bool = True
    highest_id: int = VOCABULARY - 1
    highest_class: int = LABELS - 1
    token_labels: bool = False

    def make(self) -> tuple[Any, Any]:
        generator = torch.Generator().manual_seed(5)
        ids = torch.randint(3, VOCABULARY - 1, (4, self.length), generator=generator)
        mask = torch.ones_like(ids)
        ids[0, 0] = self.highest_id
        if self.padding:
            mask[2:, 8:] = 0
        ids[2:, 8:] = 0
        if self.token_labels:
            return (ids, mask), (ids.masked_fill(mask == 0, -100), torch.full((4,), 0.1))
        return (ids, mask), torch.tensor([0, 1, 2, self.highest_class])


@dataclass(frozen=True)
class Case:
    """A model, a batch, and what is expected: severity, place and text of the problems, as patterns."""

    config: Callable[[], Any] = bert
    batch: Batch = Batch()
    expected: tuple[tuple[str, str, str], ...] = ()
    task: str = "sequence-classification"
    dtype: torch.dtype = torch.float32
    spoil: bool = False
    adapters: bool = False
    frozen: str = ""


WORDS = r"stage 0, layer 0 \(Words, bert.embeddings.word_embeddings\)"
CASES: dict[str, Case] = {
    "bert": Case(),
    "bert, partly frozen": Case(frozen="encoder.layer.0."),
    "bert in bf16": Case(dtype=torch.bfloat16),
    "gpt2, tied": Case(gpt2, Batch(token_labels=True), task="causal-lm"),
    "wrong id": Case(
        batch=Batch(highest_id=VOCABULARY),
        expected=(("error", WORDS, "bert.embeddings.word_embeddings.weight has the rows 0 to 60, asked for are 0 to 61"),),
    ),
    "too long": Case(batch=Batch(length=POSITIONS + 1), expected=(("error", WORDS, "25 tokens long"),)),
    "wrong class": Case(
        batch=Batch(highest_class=LABELS),
        expected=(("error", "data", "labels from 5 to 5, but the model has the classes 0 to 4"),),
    ),
    "attended padding": Case(
        batch=Batch(padding=False), expected=(("warning", "data", r"2 of 4 samples begin or end with the padding token \(0\)"),)
    ),
    "another computation": Case(
        spoil=True, expected=(("error", "comparison", "does not compute what transformers' own model does"),)
    ),
}


if find_spec("peft") is not None:
    CASES["bert with adapters"] = Case(adapters=True)


def spoiled(module: Any, inputs: Any, outputs: Any) -> Any:
    """What a bug in a block would do."""
    hidden, *others = outputs
    return (hidden * 1.01, *others)


def checked(name: str) -> tuple[Report, bool]:
    """The report, and whether the weights are as before."""
    from avgpipe_ds.hf import to_pipeline
    from avgpipe_ds.preflight import preflight

    case = CASES[name]
    options: dict[str, Any] = {"task": case.task, "dtype": case.dtype}
    if case.adapters:
        from peft import LoraConfig

        options["peft"] = LoraConfig(r=2, target_modules=["query", "value"], init_lora_weights="gaussian")
    torch.manual_seed(11)
    module = to_pipeline(case.config(), num_stages=2, **options)
    for key, weight in module.named_parameters():
        if case.frozen and case.frozen in module.checkpoint_name(key):
            weight.requires_grad_(False)
    if case.spoil and module.stage_id == 1:
        module.forward_funcs[0].register_forward_hook(spoiled)
    state: dict[str, Tensor] = {key: value.clone() for key, value in module.state_dict().items()}
    report = preflight(module, case.batch.make())
    return report, all(torch.equal(value, state[key]) for key, value in module.state_dict().items())


def all_checked() -> dict[str, tuple[Report, bool]]:
    return {name: checked(name) for name in CASES}


@pytest.fixture(scope="module")
def outcomes(worlds: dict[int, World]) -> list[dict[str, tuple[Report, bool]]]:
    """By rank."""
    return worlds[2].run(all_checked)


@pytest.mark.parametrize("name", CASES)
def test_what_is_found(outcomes: list[dict[str, tuple[Report, bool]]], name: str) -> None:
    (report, unchanged), (second, unchanged_there) = (outcome[name] for outcome in outcomes)
    assert report == second and unchanged and unchanged_there
    assert len(report.problems) == len(CASES[name].expected), report.problems
    for problem, (severity, where, text) in zip(report.problems, CASES[name].expected, strict=True):
        assert problem.severity == severity and re.fullmatch(where, problem.where) and re.search(text, problem.text), problem


@pytest.mark.parametrize("name", ["bert", "bert, partly frozen", "gpt2, tied", "attended padding"])
def test_the_pipeline_computes_what_transformers_does(outcomes: list[dict[str, tuple[Report, bool]]], name: str) -> None:
    report = outcomes[0][name][0]
    assert report.comparison is not None and report.note == ""
    assert report.comparison.tolerance == 1e-4
    assert max(report.comparison.loss_difference, report.comparison.norm_difference) < 1e-5
    # With dropout it is another one: what is compared is without.
    assert report.gradient_norm is not None and abs(report.gradient_norm - report.comparison.norm) > 1e-3


@pytest.mark.skipif(find_spec("peft") is None, reason="needs peft")
def test_adapters_are_compared_too(outcomes: list[dict[str, tuple[Report, bool]]]) -> None:
    report = outcomes[0]["bert with adapters"][0]
    assert report.comparison is not None and report.comparison.norm_difference < 1e-5, report.note
    words, *blocks = report.rows
    assert words.trainable == 0 and sum(row.trainable for row in blocks if row.name == "Block") == 3 * 2 * 2 * 2 * 32


def test_low_precision_gets_no_verdict(outcomes: list[dict[str, tuple[Report, bool]]]) -> None:
    comparison = outcomes[0]["bert in bf16"][0].comparison
    assert comparison is not None and comparison.tolerance is None
    assert max(comparison.loss_difference, comparison.norm_difference) < 0.1


def test_layers_have_the_names_of_transformers(outcomes: list[dict[str, tuple[Report, bool]]]) -> None:
    paths = [row.path for row in outcomes[1]["bert"][0].rows]
    assert paths[0] == "bert.embeddings.word_embeddings"
    assert [f"bert.encoder.layer.{block}" in paths for block in range(3)] == [True] * 3
    assert outcomes[0]["bert"][0].rows[-1].path == "bert, classifier"
