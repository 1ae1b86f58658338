"""With adapters of peft in it, a pipeline computes, trains and writes what the unsplit model does."""

import copy
import json

import pytest
import torch
from conftest import counted, make_batch, tiny_config, unsplit
from safetensors.torch import load_file
from test_equivalence import close, run_stages

from avgpipe_ds.hf import save_pretrained, to_pipeline

peft = pytest.importorskip("peft")

CASES = [
    ("bert", "sequence-classification"),
    ("roberta", "token-classification"),
    ("deberta-v3", "sequence-classification"),
    ("gpt2", "causal-lm"),
    ("llama-tied", "causal-lm"),
    ("llama", "sequence-classification"),
    ("gemma3", "causal-lm"),
]
LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
TASK_TYPES = {"sequence-classification": "SEQ_CLS", "token-classification": "TOKEN_CLS", "causal-lm": "CAUSAL_LM"}


def with_adapters(name, task, config=None):
    """The unsplit model with and without adapters whose weights matter."""
    model = unsplit(name, task=task)
    targets = {"target_modules": ["query", "value"]} if name == "roberta" else {}  # there peft takes the head for a linear layer
    adapted = peft.get_peft_model(copy.deepcopy(model), config or peft.LoraConfig(**LORA | targets, task_type=TASK_TYPES[task]))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model, adapted


@pytest.mark.parametrize(("name", "task"), CASES)
def test_equal_to_the_unsplit_model(name, task, tmp_path):
    model, adapted = with_adapters(name, task)
    adapted.save_pretrained(tmp_path / "theirs")
    ids, mask, labels = make_batch(name, task=task)
    expected = adapted(input_ids=ids, attention_mask=mask, labels=labels)
    expected.loss.backward()

    module = to_pipeline(model, num_stages=1, task=task, peft=tmp_path / "theirs")
    logits, loss = run_stages(module, 3, (ids, mask), labels)
    close(logits[counted(task, mask)], expected.logits[counted(task, mask)])
    close(loss, expected.loss)
    theirs = {key.removeprefix("base_model.model."): p.grad for key, p in adapted.named_parameters() if p.requires_grad}
    ours = {module.checkpoint_name(key): p.grad for key, p in module.named_parameters() if p.requires_grad}
    assert ours.keys() == theirs.keys()
    for key, gradient in theirs.items():
        close(ours[key], gradient, msg=lambda text, key=key: f"{key}: {text}")

    save_pretrained(module, tmp_path / "ours")
    ours, theirs = (load_file(tmp_path / side / "adapter_model.safetensors") for side in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    again = peft.PeftModel.from_pretrained(copy.deepcopy(model), tmp_path / "ours")
    assert torch.equal(
        again(input_ids=ids, attention_mask=mask).logits, adapted.eval()(input_ids=ids, attention_mask=mask).logits
    )


@pytest.mark.parametrize(("name", "task"), CASES)
def test_merged(name, task, tmp_path):
    model, adapted = with_adapters(name, task)
    adapted.save_pretrained(tmp_path / "adapters")
    save_pretrained(to_pipeline(model, num_stages=1, task=task, peft=tmp_path / "adapters"), tmp_path / "whole", merge=True)
    merged, info = type(model).from_pretrained(tmp_path / "whole", output_loading_info=True)
    assert not any(info.values()), info
    for key, tensor in adapted.merge_and_unload().state_dict().items():
        assert torch.equal(merged.state_dict()[key], tensor), key


def test_new_adapters_begin_as_with_peft():
    model = unsplit("llama-tied")
    module = to_pipeline(model, num_stages=1, task="causal-lm", peft=peft.LoraConfig(**LORA))
    weights = {module.checkpoint_name(key): tensor for key, tensor in module.state_dict().items()}
    first = [tensor for key, tensor in weights.items() if ".lora_A." in key]
    assert all(tensor.std() > 0.05 for tensor in first)
    assert not any(tensor.any() for key, tensor in weights.items() if ".lora_B." in key)
    alike = [torch.equal(a, b) for i, a in enumerate(first) for b in first[:i] if a.shape == b.shape]
    assert not any(alike), "two layers drew the same numbers"
    for key, tensor in model.state_dict().items():
        if key != "lm_head.weight":
            own = next(value for name, value in weights.items() if name.replace(".base_layer", "") == key)
            assert torch.equal(own, tensor), key
    trained = {module.checkpoint_name(key) for key, parameter in module.named_parameters() if parameter.requires_grad}
    assert trained == {key for key in weights if ".lora_" in key}
    ids, mask, _ = make_batch("llama-tied", "none")
    close(module((ids, mask)), model(input_ids=ids, attention_mask=mask).logits)


def test_a_head_is_trained_with_the_adapters(tmp_path):
    module = to_pipeline(
        unsplit("bert").bert, num_stages=1, task="sequence-classification", num_labels=3, peft=peft.LoraConfig(**LORA)
    )
    save_pretrained(module, tmp_path)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    assert tensors["base_model.model.classifier.weight"].shape == (3, 32)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["task_type"] == "SEQ_CLS"


def test_ia3(tmp_path):
    config = peft.IA3Config(task_type="CAUSAL_LM", target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"])
    model, adapted = with_adapters("llama", "causal-lm", config)
    adapted.save_pretrained(tmp_path / "theirs")
    module = to_pipeline(model, num_stages=1, task="causal-lm", peft=tmp_path / "theirs")
    ids, mask, _ = make_batch("llama", "none")
    close(module((ids, mask)), adapted(input_ids=ids, attention_mask=mask).logits)


def test_what_is_refused(tmp_path):
    def refused(match, adapters, **options):
        with pytest.raises(ValueError, match=match):
            to_pipeline(tiny_config("llama"), num_stages=1, task="causal-lm", peft=adapters, **options)

    refused("expected a folder with adapter_config.json and adapter_model.safetensors", tmp_path)
    refused("not supported: expected LoRA without DoRA", peft.LoraConfig(**LORA, use_dora=True))
    refused("computes with the model's weights", peft.LoraConfig(**LORA, init_lora_weights="pissa"))
    refused("expected adapters inside the blocks", peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    refused("Target modules .*nowhere", peft.LoraConfig(target_modules=["nowhere"]))
    _, adapted = with_adapters("gpt2", "causal-lm")
    adapted.save_pretrained(tmp_path)
    refused("Target modules|lacks .* tensors", tmp_path)
    module = to_pipeline(tiny_config("llama"), num_stages=1, task="causal-lm")
    with pytest.raises(ValueError, match="made without peft="):
        save_pretrained(module, tmp_path / "new", merge=True)
    with pytest.raises(RuntimeError, match="adapters are in this folder"):
        save_pretrained(module, tmp_path)
