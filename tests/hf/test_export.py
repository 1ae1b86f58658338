"""What is written, transformers loads as it was."""

import json

import pytest
import torch
from conftest import AUTO_CLASSES, EVERY_TASK, MODELS, TASKS, counted, make_batch, tiny_config, unsplit
from safetensors.torch import load_file

from avgpipe_ds.hf import save_pretrained, to_pipeline


def load(name, folder, *, task=None, **options):
    model, info = AUTO_CLASSES[task or TASKS[name]].from_pretrained(folder, output_loading_info=True, **options)
    assert not any(info.values()), info
    return model.eval()


@pytest.mark.parametrize(("name", "task"), EVERY_TASK)
def test_round_trip(name, task, tmp_path):
    original = unsplit(name, task=task)
    module = to_pipeline(original, num_stages=1, task=task).eval()
    save_pretrained(module, tmp_path / "deep" / "folder")
    assert {file.name for file in (tmp_path / "deep" / "folder").iterdir()} - {"generation_config.json"} == {
        "config.json",
        "model.safetensors",
    }
    model = load(name, tmp_path / "deep" / "folder", task=task)
    assert type(model) is type(original)
    for key, tensor in original.state_dict().items():
        assert torch.equal(model.state_dict()[key], tensor), key
    ids, mask, _ = make_batch(name, task=task)
    logits, expected = module((ids, mask)), model(input_ids=ids, attention_mask=mask).logits
    assert torch.equal(logits[counted(task, mask)], expected[counted(task, mask)])


@pytest.mark.parametrize("name", MODELS)
def test_the_files_are_those_of_transformers(name, tmp_path):
    """Same names in the file (tied tensors once), same config."""
    original = unsplit(name)
    original.save_pretrained(tmp_path / "theirs")
    save_pretrained(to_pipeline(original, num_stages=1, task=TASKS[name]), tmp_path / "ours")
    ours, theirs = (load_file(tmp_path / side / "model.safetensors") for side in ("ours", "theirs"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in theirs)
    ours, theirs = (json.loads((tmp_path / side / "config.json").read_text()) for side in ("ours", "theirs"))
    assert ours == theirs


def test_the_config_tells_the_classes(tmp_path):
    labels = {0: "world", 1: "sport", 2: "business"}
    module = to_pipeline(tiny_config("bert"), num_stages=1, task="sequence-classification", id2label=labels)
    save_pretrained(module, tmp_path)
    model = load("bert", tmp_path)
    assert model.config.id2label == labels and model.config.num_labels == 3
    assert model.config.architectures == ["BertForSequenceClassification"]


class Engine:
    """As much of an engine as saving looks at."""

    def __init__(self, module, shift):
        self.module, self.shift = module, shift

    def reference_state_dict(self):
        return {name: tensor.float() + self.shift for name, tensor in self.module.state_dict().items()}


def test_the_reference_model_is_the_model(tmp_path):
    module = to_pipeline(unsplit("gpt2"), num_stages=1, task="causal-lm")
    save_pretrained(Engine(module, shift=1.0), tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    for name, tensor in module.state_dict().items():
        assert torch.equal(saved[module.checkpoint_name(name)], tensor + 1.0)


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_dtypes(dtype, tmp_path):
    """The module's dtype, though the reference is fp32; or the one asked for."""
    module = to_pipeline(unsplit("llama-tied"), num_stages=1, task="causal-lm", dtype=torch.bfloat16)
    save_pretrained(Engine(module, shift=0.001), tmp_path, dtype=dtype)
    expected = dtype or torch.bfloat16
    saved = load_file(tmp_path / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {expected}
    assert load("llama-tied", tmp_path).dtype == expected
    name = "model.norm.weight"
    (own,) = (tensor for key, tensor in module.state_dict().items() if module.checkpoint_name(key) == name)
    assert torch.equal(saved[name], (own.float() + 0.001).to(expected))


def test_a_later_save_replaces_an_earlier_one(tmp_path):
    """Also one in several files, of which none may stay: transformers might load it."""
    unsplit("bert").save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    module = to_pipeline(tiny_config("bert"), num_stages=1, task="sequence-classification")
    (tmp_path / "tokenizer.json").write_text("{}")
    for _ in range(2):
        save_pretrained(module, tmp_path)
        assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]


def test_a_failing_save_leaves_the_earlier_one(tmp_path, monkeypatch):
    module = to_pipeline(tiny_config("bert"), num_stages=1, task="sequence-classification")
    save_pretrained(module, tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with torch.no_grad():
        module.get_parameter("2.layer.output.dense.bias").add_(1)

    def fail(*args, **kwargs):
        raise OSError("No space left on device")

    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", fail)
    with pytest.raises(RuntimeError, match="rank 0 could not write the model to .*: OSError: No space left"):
        save_pretrained(module, tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_other_modules_are_refused(tmp_path):
    with pytest.raises(ValueError, match="made with avgpipe_ds.hf.to_pipeline, got Linear"):
        save_pretrained(torch.nn.Linear(2, 2), tmp_path)
