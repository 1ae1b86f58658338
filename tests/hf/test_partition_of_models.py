import pytest
from conftest import TASKS, tiny_config

from avgpipe_ds.hf import to_pipeline


@pytest.mark.parametrize("method", ["compute", "parameters", "uniform", "type:Block"])
def test_methods(method):
    module = to_pipeline(tiny_config("gpt2"), num_stages=1, task=TASKS["gpt2"], partition_method=method)
    assert module.parts == [0, 7]


def test_counts_include_frozen_and_tied_parameters():
    module = to_pipeline(tiny_config("gpt2"), num_stages=1, task="causal-lm")
    block = 12 * 32 * 32 + 13 * 32
    assert module._parameter_counts == [61 * 32, 24 * 32, block, block, block, 61 * 32, 2 * 32]


def test_boundaries_that_were_measured():
    module = to_pipeline(tiny_config("gpt2"), num_stages=1, task="causal-lm", partition=[0, 7])
    assert module.parts == [0, 7]
    with pytest.raises(ValueError, match=r"partition \[0, 3, 7\] is of 2 stages, the module has 1"):
        to_pipeline(tiny_config("gpt2"), num_stages=1, task="causal-lm", partition=[0, 3, 7])
    with pytest.raises(ValueError, match=r"partition \[0, 6\] ends at layer 6, the module has 7"):
        to_pipeline(tiny_config("gpt2"), num_stages=1, task="causal-lm", partition=[0, 6])
