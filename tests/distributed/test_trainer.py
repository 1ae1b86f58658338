"""`PipelineTrainer`: what `transformers.Trainer` does, on pipelines; and the same when it was interrupted."""

from __future__ import annotations

import csv
import json
import os
import re
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, Trainer, TrainingArguments, pipeline

from tests.distributed import trainer_cases as cases
from tests.distributed.world import World

pytestmark = pytest.mark.timeout(240)

WHOLE = {"logging_steps": 3, "eval_strategy": "epoch", "save_strategy": "steps", "save_steps": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a model, the same with a head and without dropout, and data."""
    place = tmp_path_factory.mktemp("trainer")
    cases.make_model(place / "model")
    cases.make_model(place / "sure", dropout=0.0, num_labels=2)
    cases.make_csv(place / "reviews.csv")
    return place


@pytest.fixture(scope="module")
def whole(worlds: dict[int, World], folder: Path) -> list[dict[str, Any]]:
    """An undisturbed training, by rank."""
    return worlds[2].run(cases.train, folder, "whole", WHOLE)


def checkpoints(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("checkpoint-*")}


def test_a_training(whole: list[dict[str, Any]], folder: Path) -> None:
    first, second = whole
    assert first["steps"] == 10 and first["epoch"] == 2.0  # 40 samples, 2 pipelines of 4 a step
    assert [line["step"] for line in first["logs"]] == [3, 6, 9]
    assert [line["step"] for line in first["evaluations"]][:2] == [5, 10]
    assert [line["learning_rate"] for line in first["logs"]] == pytest.approx([2e-3 * (1 - step / 10) for step in (2, 5, 8)])
    assert all(line["grad_norm"] > 0 and line["samples_per_second"] > 0 for line in first["logs"])
    assert first["evaluated"] == second["evaluated"] and set(first["evaluated"]) == {"eval_loss", "eval_accuracy"}
    assert first["predicted"] == {name.replace("eval", "test"): value for name, value in first["evaluated"].items()}
    assert np.array_equal(first["predictions"], second["predictions"]) and first["predictions"].shape == (10, 2)
    for mine, theirs in zip(first["logs"], second["logs"], strict=True):
        assert (mine["loss"], mine["grad_norm"]) == (theirs["loss"], theirs["grad_norm"])
    assert checkpoints(folder / "whole") == {"checkpoint-4", "checkpoint-8", "checkpoint-10"}
    state = json.loads((folder / "whole" / "trainer_state.json").read_text())
    assert state["global_step"] == 10 and [line["loss"] for line in state["log_history"] if "loss" in line] == [
        line["loss"] for line in first["logs"]
    ]


def test_a_resumed_training_goes_on_bit_for_bit(worlds: dict[int, World], whole: list[dict[str, Any]], folder: Path) -> None:
    checkpoint = str(folder / "whole" / "checkpoint-4")
    resumed = worlds[2].run(cases.train, folder, "resumed", WHOLE, checkpoint)
    assert checkpoints(folder / "resumed") == {"checkpoint-8", "checkpoint-10"}, "it began anew"
    for before, after in zip(whole, resumed, strict=True):
        assert [(line["step"], line["loss"], line["grad_norm"], line["learning_rate"]) for line in after["logs"]] == [
            (line["step"], line["loss"], line["grad_norm"], line["learning_rate"]) for line in before["logs"]
        ]
        assert after["training_loss"] == before["training_loss"] and after["evaluated"] == before["evaluated"]
        assert np.array_equal(after["predictions"], before["predictions"])


@pytest.mark.parametrize("name", ["model", "checkpoint-10"])
def test_transformers_loads_what_was_saved(whole: list[dict[str, Any]], folder: Path, name: str) -> None:
    samples, tokenizer = cases.tokens(folder)
    classify = pipeline("text-classification", model=str(folder / "whole" / name), device="cpu")
    texts = [tokenizer.decode(sample.input_ids, skip_special_tokens=True) for sample in samples.validation]
    said = [classify(text)[0] for text in texts]
    expected = torch.tensor(whole[0]["predictions"]).softmax(-1)
    assert [one["label"] for one in said] == [cases.LABEL_NAMES[row] for row in expected.argmax(-1)]
    assert [one["score"] for one in said] == pytest.approx(expected.max(-1).values.tolist(), abs=1e-5)


def trained_by_transformers(folder: Path, **options: Any) -> list[dict[str, float]]:
    """Logs of `Trainer`, whose batch is the whole data set: an order of samples that is not ours makes no difference then."""
    samples, tokenizer = cases.tokens(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder / "sure")
    table = samples.train.table.select_columns(["input_ids", "labels"])
    args = TrainingArguments(
        str(folder / "theirs"),
        per_device_train_batch_size=len(table),
        use_cpu=True,
        save_strategy="no",
        logging_steps=1,
        **options,
    )
    trainer = Trainer(model, args, train_dataset=table, processing_class=tokenizer)
    trainer.train()
    return [line for line in trainer.state.log_history if "loss" in line]


@pytest.mark.parametrize(
    "options",
    [
        {"learning_rate": 5e-3, "max_grad_norm": 0.1, "lr_scheduler_type": "cosine", "warmup_steps": 2},
        {"learning_rate": 5e-3, "weight_decay": 0.5, "label_smoothing_factor": 0.2, "lr_scheduler_type": "constant"},
    ],
    ids=["clipped", "decayed and smoothed"],
)
def test_the_same_as_transformers(worlds: dict[int, World], folder: Path, options: dict[str, Any]) -> None:
    pytest.importorskip("accelerate")
    options = {"num_train_epochs": 6, **options}
    shape = {"num_pipelines": 1, "per_device_train_batch_size": 10, "gradient_accumulation_steps": 4}
    (ours, _) = worlds[2].run(cases.train_sure, folder, f"ours-{options['lr_scheduler_type']}", options | shape)
    with mock.patch.dict(os.environ):  # accelerate writes into it that there is one process
        os.environ.pop("LOCAL_RANK", None)  # of other tests here; it would look for other processes
        theirs = trained_by_transformers(folder, **options)
    assert len(ours["logs"]) == len(theirs) == 6
    for mine, their in zip(ours["logs"], theirs, strict=True):
        assert (mine["step"], mine["epoch"]) == (their["step"], their["epoch"])
        assert mine["learning_rate"] == pytest.approx(their["learning_rate"])
        assert mine["loss"] == pytest.approx(their["loss"], abs=2e-4)
        assert mine["grad_norm"] == pytest.approx(their["grad_norm"], rel=2e-3)


def test_replicas_train_the_same(worlds: dict[int, World], folder: Path) -> None:
    options = {"num_stages": 2, "max_steps": 3, "per_device_train_batch_size": 2}
    alone = worlds[2].run(cases.train_sure, folder, "alone", options | {"gradient_accumulation_steps": 4})[0]
    several = worlds[4].run(cases.train_sure, folder, "several", options | {"gradient_accumulation_steps": 2})
    for rank in several:
        assert [line["loss"] for line in rank["logs"]] == pytest.approx([line["loss"] for line in alone["logs"]], rel=1e-5)
        assert rank["evaluated"]["eval_loss"] == pytest.approx(alone["evaluated"]["eval_loss"], rel=1e-5)
        np.testing.assert_allclose(rank["predictions"], alone["predictions"], atol=1e-5)
        assert np.array_equal(rank["labels"], alone["labels"])


def test_the_best_is_kept_and_loaded(worlds: dict[int, World], folder: Path) -> None:
    ranks = worlds[2].run(cases.stop_early, folder, "early")
    best = folder / "early" / "checkpoint-2"
    for rank in ranks:
        assert rank["steps"] == 4 and rank["state"].best_metric == 0.6 and rank["state"].best_model_checkpoint == str(best)
    assert checkpoints(folder / "early") == {"checkpoint-2", "checkpoint-4"}
    saved = AutoModelForSequenceClassification.from_pretrained(best).state_dict()
    last = AutoModelForSequenceClassification.from_pretrained(folder / "early" / "checkpoint-4").state_dict()
    loaded = {name: tensor for rank in ranks for name, tensor in rank["weights"].items()}
    assert loaded.keys() >= {"classifier.weight", "bert.embeddings.word_embeddings.weight"}
    assert all(torch.equal(tensor, saved[name]) for name, tensor in loaded.items())
    assert any(not torch.equal(tensor, last[name]) for name, tensor in loaded.items())


def test_number_of_pipelines_found_out(worlds: dict[int, World], folder: Path) -> None:
    tuning = {"avgpipe": {"tuning": {"iterations": 3, "max_pipelines": 2}}}
    options = {"num_pipelines": "auto", "max_steps": 16, "deepspeed": tuning}
    for rank in worlds[2].run(cases.train, folder, "auto", options):
        number = rank["num_pipelines"]
        assert rank["steps"] == 16 and number in (1, 2)
        alone = 3 + 2  # steps of one pipeline, with warm-up
        assert rank["epoch"] * 10 == pytest.approx(alone + (16 - alone) * number)  # an epoch is 10 batches of 4 samples


def test_options(worlds: dict[int, World], folder: Path) -> None:
    options = {
        "bf16": True,
        "gradient_checkpointing": True,
        "group_by_length": True,
        "attn_implementation": "eager",
        "partition": [0, 3, 5],
        "report_to": "csv",
        "eval_strategy": "steps",
        "eval_steps": 0.5,
        "deepspeed": {"zero_optimization": {"stage": 1}, "train_batch_size": "auto"},
    }
    rank = worlds[2].run(cases.train, folder, "options", options)[0]
    assert rank["steps"] == 10 and [line["step"] for line in rank["evaluations"]][:2] == [5, 10]
    (file,) = (folder / "options" / "runs").glob("Eval_loss*.csv")
    rows = list(csv.reader(file.read_text().splitlines()))[1:]
    assert [int(row[0]) for row in rows][:2] == [40, 80]  # samples
    assert float(rows[0][1]) == pytest.approx(rank["evaluations"][0]["eval_loss"])


ERRORS = {
    "task": "train_dataset: the task 'sequence-classification' needs a class for every sample, but .* have tokens alone",
    "masked": "eval_dataset: .* but these samples have tokens to be masked",
    "not tokenised": "train_dataset: expected tokenised samples, such as .* got a Dataset",
    "empty": "train_dataset: there is no sample in it",
    "too long": "sample 40 has 25 tokens, and the model has 20 positions: tokenise with max_length=20",
    "classes": "eval_dataset: sample 0 is of class 2, and the model has the classes 0 to 1: pass id2label",
    "no eval_dataset": "eval_dataset: expected one with eval_strategy='steps', got None",
    "tokenizer": "processing_class: expected the model's tokenizer, got None",
    "stages": "num_stages: expected it to divide the 2 processes, got 3",
    "model": "expected a folder with a Hugging Face model",
    "output_dir": "File exists",
    "configuration": "gradient_accumulation_steps: the arguments say 2, the configuration says 8\n.*bf16.enabled: .*False.*True",
    "block": 'avgpipe.schedule.advances: unknown key; did you mean "avgpipe.schedule.advance"',
    "tokens": "needs a label for every token, but these samples have a class for every sample",
}


def test_bad_begins(worlds: dict[int, World], folder: Path) -> None:
    first, second = worlds[2].run(cases.bad_begins, folder)
    for name, text in ERRORS.items():
        for kind, said in (first[name], second[name]):
            assert kind and re.search(text, said, flags=re.DOTALL), (name, kind, said)
    assert first["one rank"] == (
        "ConfigError",
        "rank 1 can't begin: DataError: train_dataset: there is no sample in it.",
    )
    assert second["one rank"][0] == "DataError"
    table = (Path(__file__).parents[2] / "docs" / "trainer.md").read_text().split("## When something is wrong")[1]
    documented = re.findall(r"^\| `(.+?)` \|", table, flags=re.MULTILINE)
    assert len(documented) == 6
    for message in documented[:5]:  # the last is one of test_bad_calls
        assert any(message in said for _, said in first.values()), message


def test_bad_calls(worlds: dict[int, World], folder: Path) -> None:
    for found in worlds[2].run(cases.bad_calls, folder):
        assert "expected tokenised samples, got None" in found["evaluate"][1]
        assert "needs a class for every sample" in found["evaluate other"][1]
        assert found["nearly too long"] == ("", "no error")
        assert "expected a folder with a complete checkpoint" in found["incomplete"][1]
        assert found["steps"] == ("", "2") and found["resumed"] == ("", "4")
        assert found["again"][0] == "RuntimeError" and "has trained 2 steps" in found["again"][1]
        assert "expected no checkpoints in output_dir" in found["among checkpoints"][1]
        assert found["other data"][0] == "DataError" and "seed 42 there, 1 here" in found["other data"][1]


def test_back_to_a_checkpoint_in_the_same_trainer(worlds: dict[int, World], whole: list[dict[str, Any]], folder: Path) -> None:
    checkpoint = str(folder / "whole" / "checkpoint-4")
    for before, after in zip(whole, worlds[2].run(cases.train_twice, folder, "twice", WHOLE, checkpoint), strict=True):
        assert [line["loss"] for line in after["logs"]] == [line["loss"] for line in before["logs"]]
        assert np.array_equal(after["predictions"], before["predictions"])


def test_ranks_that_decide_differently(worlds: dict[int, World], folder: Path) -> None:
    """No hang, and it is said which rank did what."""
    for _, said in worlds[2].run(cases.stop_on_one_rank, folder, "differently", timeout_s=60):
        assert "rank 0 (stage 0) is in hf.save_pretrained; rank 1 (stage 1) is in train_batch" in said


def test_language_model(worlds: dict[int, World], folder: Path) -> None:
    ranks = worlds[2].run(cases.train_language_model, folder, "language")
    for rank in ranks:
        assert rank["after"]["eval_loss"] < rank["before"]["eval_loss"] - 0.2
        assert rank["after"]["eval_accuracy"] > rank["before"]["eval_accuracy"]
        assert rank["shape"][0] == cases.NUM_HELD_OUT and rank["shape"][1] >= rank["longest"]
    (shapes,) = [rank["shapes"] for rank in ranks if rank["shapes"]]  # one rank computes metrics
    assert len(shapes) == 3 and all(predictions == labels for predictions, labels in shapes)


def test_adapters(worlds: dict[int, World], folder: Path) -> None:
    peft = pytest.importorskip("peft")
    rank = worlds[2].run(cases.train_adapters, folder, "adapters")[0]
    base = AutoModelForSequenceClassification.from_pretrained(folder / "sure")
    model = peft.PeftModel.from_pretrained(base, folder / "adapters" / "model").eval()
    samples, _ = cases.tokens(folder)
    with torch.no_grad():
        logits = [model(input_ids=torch.tensor([sample.input_ids])).logits[0] for sample in samples.validation]
    np.testing.assert_allclose(torch.stack(logits).numpy(), rank["predictions"], atol=1e-5)
