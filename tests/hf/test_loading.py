"""Weights come from wherever transformers keeps them, and each stage reads its own."""

import copy
import json
import logging
from itertools import combinations

import pytest
import torch
from conftest import AUTO_CLASSES, MODELS, TASKS, make_batch, tiny_config, unsplit
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import AutoModel, BertConfig, BertForMaskedLM

from avgpipe_ds.hf import to_pipeline
from avgpipe_ds.hf.families import family_of
from avgpipe_ds.hf.layers import CallFinder
from avgpipe_ds.hf.plan import cuts_of, plan_layers
from avgpipe_ds.hf.shell import build_shell, own_shapes
from avgpipe_ds.hf.skeleton import only_calls
from avgpipe_ds.hf.sources import SafetensorsSource, open_pretrained
from avgpipe_ds.hf.weights import WeightLoader, with_buffers
from avgpipe_ds.partition import balanced_parts


def convert(source, name, **options):
    return to_pipeline(source, num_stages=1, task=TASKS[name], **options)


def named_weights(module):
    return {module.checkpoint_name(name): tensor for name, tensor in module.state_dict().items()}


def assert_same_weights(module, model):
    expected = model.state_dict()
    ours = named_weights(module)
    assert ours.keys() == expected.keys() - model.all_tied_weights_keys.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("shards", [{}, {"max_shard_size": "20KB"}])
@pytest.mark.parametrize("name", MODELS)
def test_a_folder_of_safetensors(name, shards, saved):
    model, folder = saved(name, **shards)
    assert (folder / "model.safetensors.index.json").exists() == bool(shards)
    assert_same_weights(convert(folder, name), model)
    assert_same_weights(convert(str(folder), name), model)


@pytest.mark.parametrize("legacy_zip", [True, False])
@pytest.mark.parametrize("shards", [1, 2])
def test_a_folder_of_pickles(shards, legacy_zip, tmp_path):
    model = unsplit("llama-tied")
    model.config.save_pretrained(tmp_path)
    state = model.state_dict()
    files = ["pytorch_model.bin"] if shards == 1 else ["pytorch_model-1.bin", "pytorch_model-2.bin"]
    for index, file in enumerate(files):
        part = {name: tensor for name, tensor in list(state.items())[index::shards]}
        torch.save(part, tmp_path / file, _use_new_zipfile_serialization=not legacy_zip)
    if shards > 1:
        weight_map = {name: files[index % shards] for index, name in enumerate(state)}
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert_same_weights(convert(tmp_path, "llama-tied"), model)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_in_memory_is_copied(name):
    model = unsplit(name)
    module = convert(model, name)
    assert_same_weights(module, model)
    theirs = {tensor.data_ptr() for tensor in model.state_dict().values()}
    assert not theirs & {tensor.data_ptr() for tensor in module.state_dict().values()}
    assert module.hf_config is not model.config


def test_the_config_of_the_caller_stays_as_it_is():
    config = tiny_config("bert")
    module = convert(config, "bert", num_labels=9, attn_implementation="eager", dtype=torch.bfloat16)
    assert config.to_dict() == tiny_config("bert").to_dict()
    assert module.hf_config.num_labels == 9


def test_the_requested_dtype():
    module = convert(unsplit("llama"), "llama", dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in module.parameters()} == {torch.bfloat16}
    assert torch.get_default_dtype() == torch.float32


def test_a_base_model_has_other_names_and_no_head(tmp_path, caplog):
    model = unsplit("bert").bert
    model.save_pretrained(tmp_path)
    assert "embeddings.word_embeddings.weight" in load_file(tmp_path / "model.safetensors")
    with caplog.at_level(logging.INFO, logger="avgpipe_ds"):
        module = convert(tmp_path, "bert", num_labels=7)
    assert "new weights, to be trained: classifier.weight, classifier.bias" in caplog.text
    ours = named_weights(module)
    for name, tensor in model.state_dict().items():
        assert torch.equal(ours[f"bert.{name}"], tensor)
    assert ours["classifier.weight"].shape == (7, 32)
    assert 0.01 < ours["classifier.weight"].std() < 0.03 and not ours["classifier.bias"].any()  # initializer_range 0.02


def test_names_of_old_checkpoints(tmp_path):
    """The files of bert-base-uncased call the norms' weights gamma and beta, and bring heads of the pretraining."""
    model = unsplit("bert")
    model.config.save_pretrained(tmp_path)
    old = {"cls.predictions.bias": torch.zeros(61)}
    for name, tensor in model.state_dict().items():
        old[name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")] = tensor
    save_file(old, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert_same_weights(convert(tmp_path, "bert"), model)


def test_a_tied_weight_under_the_name_of_the_head(tmp_path):
    model = unsplit("gpt2")
    model.config.save_pretrained(tmp_path)
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "transformer.wte.weight"}
    save_file(state, tmp_path / "model.safetensors")
    assert_same_weights(convert(tmp_path, "gpt2"), model)


def test_weights_without_a_place_are_named(tmp_path, caplog):
    BertForMaskedLM(tiny_config("bert")).save_pretrained(tmp_path)
    with caplog.at_level(logging.INFO, logger="avgpipe_ds"):
        convert(tmp_path, "bert")
    ignored = next(record for record in caplog.records if "ignored" in record.message)
    assert ignored.levelno == logging.INFO and "cls.predictions.transform.dense.weight" in ignored.message
    new = next(record for record in caplog.records if "new weights" in record.message)
    assert new.levelno == logging.WARNING and "bert.pooler.dense.weight" in new.message


def test_other_classes_get_a_new_head(saved, caplog):
    model, folder = saved("bert")
    with caplog.at_level(logging.WARNING, logger="avgpipe_ds"):
        module = convert(folder, "bert", id2label={0: "no", 1: "yes"})
    assert "classifier.weight, classifier.bias" in caplog.text and "pooler" not in caplog.text
    assert named_weights(module)["classifier.weight"].shape == (2, 32)
    assert torch.equal(named_weights(module)["bert.pooler.dense.weight"], model.bert.pooler.dense.weight)
    assert module.hf_config.label2id == {"no": 0, "yes": 1}


@pytest.mark.parametrize("name", MODELS)
def test_random_weights_are_distributed_as_in_transformers(name):
    torch.manual_seed(0)
    config = tiny_config(name)
    config.initializer_range = 0.05
    theirs = build_real(name, config).state_dict()
    before = torch.get_rng_state()
    ours = named_weights(convert(config, name))
    assert torch.equal(torch.get_rng_state(), before), "the global random state moved"
    for parameter, tensor in ours.items():
        assert_close(tensor.mean(), theirs[parameter].mean(), atol=0.01, rtol=0)
        assert_close(tensor.std(), theirs[parameter].std(), atol=0.01, rtol=0)


def build_real(name, config):
    return AUTO_CLASSES[TASKS[name]].from_config(copy.deepcopy(config))


def plan_of(shell):
    family = family_of(shell.config)
    return plan_layers(shell, family, CallFinder(with_buffers(only_calls(shell, family), shell), family))


def stage_loads(name, num_stages, source, seed=1234):
    """What each stage of `num_stages` builds: its tensors by transformers' name, and its loader."""
    config = tiny_config(name)
    shell = build_shell(config, TASKS[name], torch.float32)
    plan = plan_of(shell)
    cuts = cuts_of(plan)
    parts = [cuts[place] for place in balanced_parts([1] * (len(cuts) - 1), num_stages)]
    for start, stop in zip(parts, parts[1:], strict=False):
        loader = WeightLoader(shell, plan, source, seed=seed)
        tensors = {}
        for index in range(start, stop):
            layer = plan[index].spec.build()
            loader.fill(index, layer)
            tensors |= {plan[index].checkpoint_name(key): tensor for key, tensor in layer.state_dict().items()}
        yield tensors, loader


@pytest.mark.parametrize("name", MODELS)
def test_random_weights_do_not_depend_on_the_number_of_stages(name):
    whole = named_weights(convert(tiny_config(name), name))
    for num_stages in (2, 3):
        for tensors, _ in stage_loads(name, num_stages, None):
            for key, tensor in tensors.items():
                assert torch.equal(tensor, whole[key]), key
    drawn = [tensor for tensor in whole.values() if tensor.std() > 0]
    alike = (torch.equal(first, second) for first, second in combinations(drawn, 2) if first.shape == second.shape)
    assert not any(alike), "two layers drew the same numbers"
    other = named_weights(convert(tiny_config(name), name, seed=1))
    assert any(not torch.equal(other[key], whole[key]) for key in whole)


@pytest.mark.parametrize("name", MODELS)
def test_a_stage_reads_its_own_tensors_only(name, saved):
    model, folder = saved(name)
    shapes = own_shapes(model)
    num_tensors = 0
    for tensors, loader in stage_loads(name, 3, open_pretrained(str(folder))):
        assert loader.num_tensors_read == len(tensors)
        assert loader.num_bytes_read == sum(4 * shapes[key].numel() for key in tensors)
        num_tensors += len(tensors)
    # a tied embedding is read by its first and its last stage
    assert num_tensors == len(shapes) + bool(model.all_tied_weights_keys)


def test_nothing_is_read_twice(saved, monkeypatch):
    """Not even a tied tensor, when one stage holds both of its ends."""
    model, folder = saved("gpt2")
    read = []
    read_one = SafetensorsSource.read
    monkeypatch.setattr(SafetensorsSource, "read", lambda self, name: (read.append(name), read_one(self, name))[1])
    convert(folder, "gpt2")
    assert sorted(read) == sorted(own_shapes(model))


def test_layers_are_built_without_initialising(monkeypatch):
    """Loading overwrites every weight, so initialising first would be work for nothing."""

    def refuse(tensor, *args, **kwargs):
        return tensor if tensor.is_meta else pytest.fail("a weight was initialised")

    monkeypatch.setattr(torch.Tensor, "normal_", refuse)
    monkeypatch.setattr(torch.Tensor, "uniform_", refuse)
    plan_of(build_shell(BertConfig(), "sequence-classification", torch.float32))[2].spec.build()


def test_the_source_is_let_go():
    model = unsplit("bert")
    assert convert(model, "bert")._loader is None


def test_a_copy_is_a_pipeline_of_its_own():
    """Several pipelines live in one process as deep copies that share only the process groups."""
    module = convert(unsplit("gpt2"), "gpt2")
    shared = (module.world_group, module._grid, module._topo)
    twin = copy.deepcopy(module, {id(thing): thing for thing in shared})
    ids, mask, _ = make_batch("gpt2")
    with torch.no_grad():
        expected = module((ids, mask))
        for parameter in module.parameters():
            parameter.zero_()
        assert torch.equal(twin((ids, mask)), expected)


def test_auto_model_of_the_base_in_memory():
    config = tiny_config("llama")
    base = AutoModel.from_config(config)
    module = convert(base, "llama")
    assert torch.equal(named_weights(module)["model.norm.weight"], base.norm.weight)
