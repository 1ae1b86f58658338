"""Two stages in two processes over gloo."""

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from conftest import AUTO_CLASSES, TASKS, make_batch, tiny_config, unsplit
from safetensors.torch import load_file
from torch.testing import assert_close

from avgpipe_ds.hf import causal_lm_loss, to_pipeline

ROOT = Path(__file__).parents[2]


def in_hub_cache(model, home: Path) -> None:
    """Lay a model out as the hub's cache does, in shards."""
    repository = home / "hub" / "models--someone--tiny-gpt2"
    model.save_pretrained(repository / "snapshots" / "abc", max_shard_size="20KB")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    # What an online look-up leaves behind for a file that the repository lacks.
    (repository / ".no_exist" / "abc").mkdir(parents=True)
    (repository / ".no_exist" / "abc" / "model.safetensors").touch()


def load(folder: Path, name: str):
    model, info = AUTO_CLASSES[TASKS[name]].from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model


def adapted_models(folder: Path) -> dict[str, Any]:
    """A model in a folder, and twice that model with adapters, each in a folder, too."""
    base, models = unsplit("llama-tied"), {}
    base.save_pretrained(folder / "base")
    for case, targets in (("everywhere", "all-linear"), ("first-block", r".*layers\.0\..*_proj")):
        config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM")
        models[case] = peft.get_peft_model(copy.deepcopy(base), config)
        with torch.no_grad():
            for parameter in models[case].parameters():
                if parameter.requires_grad:
                    parameter.add_(0.1 * torch.randn_like(parameter))
        models[case].save_pretrained(folder / case)
    return models


def step_alone(model: Any) -> dict[str, torch.Tensor]:
    """The adapters after the step that the ranks make."""
    ids, mask, labels = make_batch("llama-tied")
    causal_lm_loss(model(input_ids=ids, attention_mask=mask).logits, (labels, torch.full((4,), 1 / 40))).backward()
    torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.5).step()
    return peft.get_peft_model_state_dict(model)


@pytest.mark.distributed
@pytest.mark.timeout(240)
def test_two_ranks(tmp_path):
    original = unsplit("gpt2")
    in_hub_cache(original, tmp_path / "home")
    adapted = adapted_models(tmp_path)
    common = {**os.environ, "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}
    common |= {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(Path(__file__).with_name("two_ranks.py")), str(tmp_path)]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    ranks = [subprocess.Popen(command, env={**common, "RANK": rank, "LOCAL_RANK": rank}, **output) for rank in "01"]
    try:
        outputs = [rank.communicate(timeout=200)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(output[-3000:] for output in outputs)

    copied = load(tmp_path / "copy", "gpt2").state_dict()
    for key, tensor in original.state_dict().items():
        assert torch.equal(copied[key], tensor), key

    ids, mask, labels = make_batch("gpt2")
    loss = causal_lm_loss(original(input_ids=ids, attention_mask=mask).logits, (labels, torch.full((4,), 1 / 10)))
    loss.backward()
    torch.optim.SGD(original.parameters(), lr=0.5).step()
    assert_close(torch.load(tmp_path / "loss.pt").squeeze(), loss.detach())
    trained = load(tmp_path / "trained", "gpt2").state_dict()
    for key, tensor in original.state_dict().items():
        assert_close(trained[key], tensor, rtol=1e-5, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}")

    for case, model in adapted.items():
        trained = step_alone(model)
        for number in (1, 2):  # two pipelines with the same data: their reference makes the same step
            written = load_file(tmp_path / f"{case}-{number}" / "adapter_model.safetensors")
            assert written.keys() == trained.keys()
            for key, tensor in trained.items():
                assert_close(written[key], tensor, rtol=1e-5, atol=1e-5, msg=f"{case}: {key}")

    for name in ("llama-tied", "bert"):
        alone = to_pipeline(tiny_config(name), num_stages=1, task=TASKS[name])
        together = load(tmp_path / name, name).state_dict()
        for key, tensor in alone.state_dict().items():
            assert torch.equal(together[alone.checkpoint_name(key)], tensor), key
