"""Faults are told before anything is built, with what was expected, what came, and what to do."""

from dataclasses import replace

import pytest
from conftest import MODELS, TASKS, tiny_config, unsplit
from safetensors.torch import load_file, save_file
from transformers import T5Config

from avgpipe_ds.hf import families, supported_model_types, to_pipeline
from avgpipe_ds.hf.module import HFPipelineModule

CLASSIFY = "sequence-classification"


@pytest.fixture(autouse=True)
def nothing_is_built(monkeypatch):
    monkeypatch.setattr(HFPipelineModule, "__init__", lambda *args, **kwargs: pytest.fail("a pipeline was built"))


def refused(match, source, task=CLASSIFY, num_stages=1, **options):
    with pytest.raises(ValueError, match=match):
        to_pipeline(source, task=task, num_stages=num_stages, **options)


def test_unsupported_family():
    refused(r"base_model_pp_plan in its config, or of one of the types bert, .*gpt2.*; got 't5': describe it", T5Config())
    assert {"bert", "roberta", "distilbert", "electra", "deberta-v2", "modernbert", "gpt2", "opt"} <= set(supported_model_types())


def test_wrong_task():
    refused(r"transformers has no modernbert for 'causal-lm'", tiny_config("modernbert"), "causal-lm")
    refused(
        r"transformers has no gpt2 for 'masked-lm' \(AutoModelForMaskedLM\): choose another task",
        tiny_config("gpt2"),
        "masked-lm",
    )
    refused(r"expected task to be one of .*, got 'translation'", tiny_config("gpt2"), "translation")


def test_more_stages_than_layers_or_ranks(monkeypatch):
    refused("divide the 1 ranks, got 2", tiny_config("bert"), num_stages=2)
    refused("divide the 1 ranks, got 0", tiny_config("bert"), num_stages=0)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 6)
    refused("at most 5 stages, one per block of this bert and its two ends, got num_stages=6", tiny_config("bert"), num_stages=6)


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


def test_a_truncated_file(saved):
    _, folder = saved("bert", max_shard_size="20KB")
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-100])
    refused(rf"{shard.name} can't be read, .*copy it again", folder)


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
    refused("two or more exclusive classes, got num_labels=1", tiny_config("bert"), "token-classification", num_labels=1)
    refused("problem_type is for sequence-classification", tiny_config("bert"), "token-classification", problem_type="regression")
    refused("expected problem_type to be .*got 'ranking'", tiny_config("bert"), problem_type="ranking")


def test_no_padding_token():
    config = tiny_config("llama")
    config.pad_token_id = None
    refused(r"this llama has no pad_token_id .*pass pad_token_id=tokenizer.pad_token_id", config)


def test_a_padding_token_where_there_is_none(monkeypatch):
    kept = {}
    monkeypatch.setattr(HFPipelineModule, "__init__", lambda self, *args, hf_config, **kwargs: kept.update(vars(hf_config)))
    for given, task, expected in ((None, CLASSIFY, 2), (0, CLASSIFY, 0), (None, "causal-lm", None)):
        config = tiny_config("llama")
        config.pad_token_id = given
        to_pipeline(config, num_stages=1, task=task, pad_token_id=2)
        assert kept["pad_token_id"] == expected


def test_code_that_a_model_brings_is_not_run(tmp_path):
    """Unless it is asked for."""
    (tmp_path / "config.json").write_text('{"model_type": "strange", "auto_map": {"AutoConfig": "strange.StrangeConfig"}}')
    (tmp_path / "strange.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    refused("trust_remote_code=True", tmp_path)
    assert not (tmp_path / "ran").exists()


def test_variants_that_are_other_models():
    config = tiny_config("bert")
    config.is_decoder = True
    refused("this bert has {'is_decoder': True}, which a pipeline can't compute: expected is_decoder=False", config)
    config = tiny_config("gpt2")
    config.add_cross_attention = True
    refused("this gpt2 has {'add_cross_attention': True}", config, "causal-lm")
    config = tiny_config("opt")
    config.layerdrop = 0.1
    refused("expected layerdrop=0.0", config, "causal-lm")


def test_a_family_that_forgets_what_runs_before_the_blocks(monkeypatch):
    family = replace(families._FAMILIES["gpt2"], before={"wte": families.Role.HIDDEN})
    monkeypatch.setitem(families._FAMILIES, "gpt2", family)
    with pytest.raises(RuntimeError, match="'wpe' runs before the blocks: enter it"):
        to_pipeline(unsplit("gpt2"), task="causal-lm", num_stages=1)
