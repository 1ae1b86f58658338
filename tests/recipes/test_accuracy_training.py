"""Time to accuracy, trained for real: the commands on a small BERT without dropout and a csv file."""

import csv
import json
import os
import random
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from accuracy.records import Record, read_all
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast, set_seed

ROOT = Path(__file__).parents[2]
RECIPE = str(ROOT / "recipes" / "time_to_accuracy.py")
WORDS = ["[PAD]", "[UNK]", *(f"good{number}" for number in range(8)), *(f"bad{number}" for number in range(8))]

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(280)]


def make_model(folder: Path) -> None:
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder)
    set_seed(0)
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    BertModel(config).save_pretrained(folder)


def make_data(file: Path) -> None:
    """A sentence is good if most of its words are."""
    draw = random.Random(0)
    with file.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["text", "label"])
        for _ in range(300):
            label = draw.choice(["good", "bad"])
            words = draw.choices(WORDS[2:10], k=7 if label == "good" else 2) + draw.choices(
                WORDS[10:], k=2 if label == "good" else 7
            )
            writer.writerow([" ".join(draw.sample(words, k=draw.randint(7, 9))), label])


def start(*arguments: str, ranks: int = 1) -> str:
    """Run the recipe and return its output, that of rank 0."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks)}
    processes = [
        subprocess.Popen(
            [sys.executable, RECIPE, f"--local_rank={rank}", *arguments],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        outputs = [process.communicate(timeout=200)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert not any(process.returncode for process in processes), "\n".join(output[-3000:] for output in outputs)
    return outputs[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """With the model, the data, and `reference.jsonl`: two learning rates, two seeds."""
    folder = tmp_path_factory.mktemp("accuracy")
    make_model(folder / "model")
    make_data(folder / "data.csv")
    task = ("--model", str(folder / "model"), "--dataset", str(folder / "data.csv"), "--max-length", "16")
    budget = ("--batch-size", "8", "--max-samples", "384", "--eval-every", "48", "--warmup-samples", "48")
    grid = ("--validation-samples", "50", "--learning-rates", "1e-3,4e-3", "--seeds", "0,1")
    start("reference", "--output", str(folder / "reference.jsonl"), *task, *budget, *grid)
    return folder


def run(folder: Path, output: str, settings: str, *arguments: str, ranks: int = 1) -> tuple[dict[str, Record], str]:
    """Train `settings` at the higher rate with seed 0; return the records by setting, and the recipe's output."""
    options = ("--settings", settings, "--learning-rates", "4e-3", "--seeds", "0", *arguments)
    said = start("run", str(folder / "reference.jsonl"), "--output", str(folder / output), *options, ranks=ranks)
    return {record.setting: record for record in read_all([folder / output])}, said


def close(one: Record, other: Record, *, tolerance: float) -> None:
    assert [point.samples for point in one.curve] == [point.samples for point in other.curve]
    for left, right in zip(one.curve, other.curve, strict=True):
        assert left.training_loss == pytest.approx(right.training_loss, rel=tolerance)
        assert left.loss == pytest.approx(right.loss, rel=tolerance)
        assert left.accuracy == pytest.approx(right.accuracy, abs=1 / 50)


def test_the_reference_learns_and_seeds_and_rates_differ(folder):
    runs = {record.key: record for record in read_all([folder / "reference.jsonl"])}
    assert set(runs) == {("reference", rate, seed) for rate in (1e-3, 4e-3) for seed in (0, 1)}
    for record in runs.values():
        assert [point.samples for point in record.curve][:5] == [48, 96, 144, 192, 240]  # 240 samples are an epoch: 30 iterations
        assert record.curve[-1].accuracy > 0.9
    assert len({record.curve[0].training_loss for record in runs.values()}) == 4


def test_the_grid(folder):
    """DeepSpeed's engine trains what the reference trains; all settings see the samples they should, and stop at the target."""
    settings = "deepspeed-1x,deepspeed-3x,n2-avgpipe-outer1-alpha1/2,n3-sma-alpha0.1"
    records, said = run(folder, "whole.jsonl", settings, "--target", "1")
    assert "4 runs to do, of 4 in the grid; target 1.0000" in said
    reference = next(record for record in read_all([folder / "reference.jsonl"]) if record.key == ("reference", 4e-3, 0))
    close(records["deepspeed-1x"], reference, tolerance=1e-3)
    assert [point.samples for point in records["deepspeed-3x"].curve][:4] == [48, 96, 144, 192]
    losses = [record.curve[0].training_loss for record in records.values()]
    assert len(set(losses)) == 4, losses
    assert all(record.num_stages == 1 and record.versions["deepspeed"] for record in records.values())

    again, said = run(folder, "whole.jsonl", settings, "--target", "1")
    assert "0 runs to do" in said
    assert again == records

    early, _ = run(folder, "early.jsonl", "deepspeed-1x")
    stopped, whole = early["deepspeed-1x"].curve, records["deepspeed-1x"].curve
    assert len(stopped) < len(whole)
    assert stopped == whole[: len(stopped)]


def test_stages_do_not_change_what_is_learned(folder):
    setting = "n2-avgpipe-outer2-alpha1/2"
    alone, _ = run(folder, "alone.jsonl", setting, "--target", "1", "--micro-batches", "2")
    together, _ = run(folder, "together.jsonl", setting, "--target", "1", "--micro-batches", "2", ranks=2)
    assert together[setting].num_stages == together[setting].num_micro_batches == 2
    close(alone[setting], together[setting], tolerance=1e-3)


def test_summary(folder, tmp_path):
    speeds = tmp_path / "speeds.json"
    speeds.write_text('{"deepspeed-1f1b": 0.5}')
    run(folder, "summary.jsonl", "deepspeed-1x")
    said = start(
        *("summarise", str(folder / "reference.jsonl"), str(folder / "summary.jsonl")),
        *("--seconds-per-sample", str(speeds), "--json", str(tmp_path / "summary.json")),
    )
    assert "reference" in said
    assert "any test bed" in said
    summary = json.loads((tmp_path / "summary.json").read_text())
    found = {row["setting"]: row for row in summary["settings"]}
    samples = found["deepspeed-1x"]["samples_to_target"]["0"]
    assert 48 <= samples <= 384
    assert found["deepspeed-1x"]["median_s_to_target"] == samples * 0.5
    assert found["reference"]["learning_rates_tried"] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--settings", "n5-*"), "error: --settings: 'n5-\\*' fits no setting"),
        (("--share", "2/2"), "error: --share takes I/J"),
        (("--micro-batches", "3"), "error: --micro-batches 3 must divide the batch of a pipeline, which has 8 samples"),
    ],
)
def test_mistakes_are_told_in_a_line(folder, arguments, message):
    with pytest.raises(AssertionError, match=message) as told:
        start("run", str(folder / "reference.jsonl"), "--output", str(folder / "none.jsonl"), *arguments)
    assert "Traceback" not in str(told.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--max-length", "64"), "error: --max-length 64: .*model has positions for 32 tokens only"),
        (("--max-length", "16", "--validation-samples", "61"), "error: --validation-samples 61: .*data.csv has only 60 of them"),
    ],
)
def test_data_that_cannot_be(folder, arguments, message):
    task = ("--model", str(folder / "model"), "--dataset", str(folder / "data.csv"))
    with pytest.raises(AssertionError, match=message) as told:
        start("reference", "--output", str(folder / "none.jsonl"), *task, *arguments)
    assert "Traceback" not in str(told.value)


def test_a_run_that_diverges_is_written_down_and_the_grid_goes_on(folder):
    settings = "deepspeed-1x,n2-avgpipe-outer1-alpha1/2"
    options = ("--settings", settings, "--learning-rates", "1e30,1e-3", "--seeds", "0", "--target", "1")
    start("run", str(folder / "reference.jsonl"), "--output", str(folder / "diverged.jsonl"), *options, ranks=2)
    records = read_all([folder / "diverged.jsonl"])
    assert {(record.setting, record.learning_rate): record.diverged for record in records} == {
        (setting, rate): rate == 1e30 for setting in settings.split(",") for rate in (1e30, 1e-3)
    }
    assert all(len(record.curve) == (0 if record.diverged else 8) for record in records)
    said = start("summarise", str(folder / "reference.jsonl"), str(folder / "diverged.jsonl"), "--every-rate", "--target", "0.5")
    assert [line.split("│")[4].strip() for line in said.splitlines() if "1e+30" in line] == ["0 of 1", "0 of 1"]
