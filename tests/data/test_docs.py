"""The examples of docs/data.md run, one after another, as they stand there."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from datasets import Dataset

from avgpipe_ds.data import BatchShape, CausalLM, Collate, Sample, SequenceClassification, TrainingBatches, tokenise
from avgpipe_ds.data.labels import find_classes
from avgpipe_ds.errors import DataError

DOCUMENT = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", DOCUMENT, flags=re.DOTALL)


class Engine:
    """Takes data an iteration ahead, as the real one does; a sample's loss is its class."""

    num_pipelines = 2
    grid = SimpleNamespace(get_data_parallel_world_size=lambda: 1, get_data_parallel_rank=lambda: 0)

    def __init__(self):
        self.consumed_micro_batches = 0
        self.losses, self.waiting = [], []
        self.saved = None

    def gradient_accumulation_steps(self):
        return 2

    def train_micro_batch_size_per_gpu(self):
        return 4

    def train_batch(self, data_iter):
        while len(self.waiting) < 8 and (batch := next(data_iter, None)) is not None:
            self.waiting.append(batch)
        assert len(self.waiting) >= 4, "the data ended before the training"
        batch, self.waiting = self.waiting[:4], self.waiting[4:]
        self.losses.append(self.mean(batch))
        self.consumed_micro_batches += 4

    def eval_batch(self, data_iter, num_micro_batches):
        return self.mean([next(data_iter) for _ in range(num_micro_batches)])

    def save_checkpoint(self, folder, client_state):
        self.saved = client_state

    def load_checkpoint(self, folder):
        return folder, self.saved

    @staticmethod
    def mean(batches):
        return torch.stack([(labels * weight).sum() for _, (labels, weight) in batches]).mean()


def test_examples(byte_tokenizer, tmp_path, monkeypatch):
    tokenizer = byte_tokenizer("eos_token", "pad_token")
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda name: tokenizer)
    monkeypatch.chdir(tmp_path)
    rows = "".join(f"review {n},{'good' if n % 2 else 'bad'}\n" for n in range(60))
    Path("reviews.csv").write_text(f"text,label\n{rows}")
    Path("novel.txt").write_text("It was a dark and stormy night. " * 20)
    engine = Engine()
    names = {"engine": engine}
    for example in EXAMPLES:
        exec(compile(example, "docs/data.md", "exec"), names)  # noqa: S102
    assert names["batches"].num_iterations == len(engine.losses) == 8  # 54 samples, 16 an iteration
    assert engine.saved["data"]["epoch"] == 2
    assert names["loss"] == pytest.approx(0.5)
    assert names["blocks"].train.lengths[0] == 64
    assert names["pairs"].label_names == ["no", "maybe", "yes"]


def test_error_messages_are_those_that_occur(byte_tokenizer):
    documented = re.findall(r"^\| `(.+?)` \|", DOCUMENT.split("## When something is wrong")[1], flags=re.MULTILINE)
    letters, without_padding = byte_tokenizer("pad_token"), byte_tokenizer()
    mixed = {"training": enumerate([0, 1, 1, "x"])}
    shape = BatchShape(num_pipelines=1, num_replicas=1, num_micro_batches=1, micro_batch_size=1)
    seeds = [TrainingBatches([Sample([1], 0, 1)], Collate(pad_token_id=0), shape, seed=seed, epochs=1) for seed in (0, 1)]
    binary = SequenceClassification(label_names=["no", "yes"])
    occur = [
        lambda: tokenise(rows("a"), letters, CausalLM(text="txt")),
        lambda: tokenise(rows(*"abcdefg", None), letters, "causal-lm"),
        lambda: find_classes(mixed, None, column="label"),
        lambda: tokenise(rows(*"abcdef", label=[0, 1, 0, 1, 0, -1]), letters, binary),
        lambda: tokenise(rows("a", "b", "c" * 612, label=[0, 1, 0]), letters, binary, max_length=512),
        lambda: tokenise(rows("a", label=[0]), without_padding, binary),
        lambda: seeds[1].load_state_dict(seeds[0].state_dict(0)),
    ]
    for message, provoke in zip(documented, occur, strict=True):
        with pytest.raises(DataError, match="^" + re.escape(message)):
            provoke()


def rows(*texts, **columns):
    return Dataset.from_dict({"text": texts, **columns})
