"""Faults are told before anything is built, with what was expected, what came, and what to do."""

import pytest
import torch
from conftest import MODELS, TASKS, tiny_config, unsplit
from safetensors.torch import load_file, save_file
from transformers import T5Config

from avgpipe_ds.hf import supported_model_types, to_pipeline
from avgpipe_ds.hf.families.bert import Bert
from avgpipe_ds.hf.module import HFPipelineModule

CLASSIFY = "sequence-classification"


@pytest.fixture(autouse=True)
def nothing_is_built(monkeypatch):
    monkeypatch.setattr(HFPipelineModule, "__init__", lambda *args, **kwargs: pytest.fail("a pipeline was built"))


def refused(match, source, task=CLASSIFY, num_stages=1, **options):
    with pytest.raises(ValueError, match=match):
        to_pipeline(source, task=task, num_stages=num_stages, **options)


def test_unsupported_family():
    refused(r"bert, gpt2, llama\), got 't5'.*Family", T5Config(), task="causal-lm")
    assert supported_model_types() == ["bert", "gpt2", "llama"]


def test_wrong_task():
    refused(r"bert models are supported for \['sequence-classification'\], got", tiny_config("bert"), "causal-lm")
    refused(r"gpt2 models are supported for \['causal-lm'\]", tiny_config("gpt2"))
    refused(r"expected task to be one of .*, got 'translation'", tiny_config("gpt2"), "translation")


def test_more_stages_than_layers_or_ranks(monkeypatch):
    refused("divide the 1 ranks, got 2", tiny_config("bert"), num_stages=2)
    refused("divide the 1 ranks, got 0", tiny_config("bert"), num_stages=0)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 6)
    refused("at most 5 stages, one per layer of this bert, got num_stages=6", tiny_config("bert"), num_stages=6)


def test_no_process_group(monkeypatch):
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: False)
    with pytest.raises(RuntimeError, match="init_distributed"):
        to_pipeline(tiny_config("bert"), task=CLASSIFY, num_stages=1)


def test_missing_folder_or_files(tmp_path):
    refused("expected a folder .* is none", tmp_path / "nothing")
    refused("expected a folder .* is none", str(tmp_path / "nothing"))
    refused("expected a folder or hub name with a config.json", tmp_path)
    tiny_config("bert").save_pretrained(tmp_path)
    refused("expected weights in .*model.safetensors.*pytorch_model.bin.*found none", tmp_path)


def test_missing_shard(saved):
    _, folder = saved("bert", max_shard_size="20KB")
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shard.unlink()
    refused(rf"these are not there: \['{shard.name}'\]", folder)


@pytest.mark.parametrize("name", MODELS)
def test_missing_weights_of_the_body(name, saved):
    _, folder = saved(name)
    tensors = load_file(folder / "model.safetensors")
    gone = next(key for key in tensors if ".1." in key)
    del tensors[gone]
    save_file(tensors, folder / "model.safetensors")
    refused(rf"lack 1 tensors .*'{gone}'", folder, TASKS[name])


def test_weights_of_another_shape(saved):
    model, folder = saved("bert")
    model.config.vocab_size = 99
    model.config.save_pretrained(folder)
    refused(r"bert.embeddings.word_embeddings.weight: \[61, 32\] instead of \[99, 32\]", folder)


def test_a_head_of_another_shape_is_not_replaced_unasked(saved):
    model, folder = saved("bert")
    model.config.num_labels = 7
    model.config.save_pretrained(folder)
    refused(r"classifier.weight: \[5, 32\] instead of \[7, 32\].*pass num_labels", folder)


def test_labels():
    refused(r"name the classes 0 to 1, got \{1: 'a', 2: 'b'\}", tiny_config("bert"), id2label={1: "a", 2: "b"})
    refused(r"name the classes 0 to 2, got", tiny_config("bert"), num_labels=3, id2label={0: "a", 1: "b"})
    refused("two or more exclusive classes, got num_labels=1", tiny_config("bert"), num_labels=1)
    config = tiny_config("bert")
    config.problem_type = "multi_label_classification"
    refused("problem_type='multi_label_classification': pass a loss_fn", config)


def test_variants_that_are_other_models():
    config = tiny_config("bert")
    config.is_decoder = True
    refused("BERT encoder, got a config with is_decoder", config)
    config = tiny_config("gpt2")
    config.add_cross_attention = True
    refused("without cross-attention", config, "causal-lm")


def test_an_adapter_that_forgets_a_layer(monkeypatch):
    plan = Bert.plan
    monkeypatch.setattr(Bert, "plan", lambda *args: [*plan(*args)[:2], *plan(*args)[3:]])
    with pytest.raises(RuntimeError, match="adapter for 'bert' does not match.*no layer holds .*encoder.layer.1"):
        to_pipeline(unsplit("bert"), task=CLASSIFY, num_stages=1)


def test_the_global_state_survives_a_failing_build():
    from avgpipe_ds.hf.weights import cheap_build

    with pytest.raises(KeyError), cheap_build(torch.float64):
        raise KeyError
    assert torch.get_default_dtype() == torch.float32
    assert torch.nn.Linear(2, 2).weight.abs().sum() > 0
