"""A world of one rank for PipelineModule, and tiny models of every family."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("LOCAL_RANK", "0")

import deepspeed
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, BertConfig, GPT2Config, LlamaConfig

TASKS = {"bert": "sequence-classification", "gpt2": "causal-lm", "gpt2-untied": "causal-lm"}
TASKS |= {"llama": "causal-lm", "llama-tied": "causal-lm"}
MODELS = list(TASKS)
AUTO_CLASSES = {"sequence-classification": AutoModelForSequenceClassification, "causal-lm": AutoModelForCausalLM}


@pytest.fixture(scope="session", autouse=True)
def world_of_one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    if dist.is_initialized():
        yield
        return
    # Otherwise DeepSpeed compiles a shared-memory extension for minutes.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    store = tmp_path_factory.mktemp("store") / "file"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    yield
    dist.destroy_process_group()


def tiny_config(name: str, *, dropout: float = 0.0) -> Any:
    family, _, variant = name.partition("-")
    common = {"vocab_size": 61, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    if family == "bert":
        return BertConfig(
            **common,
            hidden_size=32,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=48,
            max_position_embeddings=24,
            num_labels=5,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
        )
    if family == "gpt2":
        rates = {"attn_pdrop": dropout, "embd_pdrop": dropout, "resid_pdrop": dropout}
        sizes = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 24}
        return GPT2Config(**common, **sizes, **rates, tie_word_embeddings=variant != "untied")
    return LlamaConfig(
        **common,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        max_position_embeddings=24,
        attention_dropout=dropout,
        tie_word_embeddings=variant == "tied",
    )


def unsplit(name: str, *, attn: str | None = None, dropout: float = 0.0, dtype: torch.dtype = torch.float32) -> Any:
    """The transformers model with weights worth comparing: also biases and norms are random."""
    torch.manual_seed(0)
    config = tiny_config(name, dropout=dropout)
    model = AUTO_CLASSES[TASKS[name]].from_config(config, dtype=dtype, **({"attn_implementation": attn} if attn else {}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def make_batch(name: str, padding: str = "right", batch: int = 4, length: int = 11) -> tuple[Any, Any, Any]:
    """input_ids, attention_mask, labels; the samples have different lengths."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(3, 61, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(batch):
        padded = 0 if padding == "none" else 2 * row
        columns = slice(0, padded) if padding == "left" else slice(length - padded, length)
        mask[row, columns] = 0
    ids = ids * mask
    if TASKS[name] == "causal-lm":
        return ids, mask, ids.masked_fill(mask == 0, -100)
    return ids, mask, torch.randint(0, 5, (batch,), generator=generator)


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., tuple[Any, Path]]:
    """Write a tiny model as transformers does; return it with its folder."""

    def save(name: str, **options: Any) -> tuple[Any, Path]:
        model = unsplit(name)
        folder = tmp_path / f"{name}-source"
        model.save_pretrained(folder, **options)
        return model, folder

    return save
