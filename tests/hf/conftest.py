"""A world of one rank for PipelineModule, and tiny models of every family."""

import gc
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("LOCAL_RANK", "0")

import deepspeed
import pytest
import torch
import torch.distributed as dist
import transformers
from deepspeed.runtime.pipe import p2p
from deepspeed.utils import groups

from avgpipe_ds.hf.tasks import Task, auto_class

VOCABULARY, POSITIONS, HIDDEN, LABELS = 61, 24, 32, 5
_IDS = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_SIZES = {"hidden_size": HIDDEN, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
_GROUPED = {"num_key_value_heads": 2}
_SLIDING = {"sliding_window": 4}
_POSITIONS = {"max_position_embeddings": POSITIONS}


@dataclass(frozen=True)
class Tiny:
    """A tiny config: its class, and options; the names of its dropout rates."""

    config: str
    options: dict[str, Any]
    dropouts: tuple[str, ...] = ("hidden_dropout_prob", "attention_probs_dropout_prob")

    def build(self, dropout: float = 0.0) -> Any:
        rates = dict.fromkeys(self.dropouts, dropout)
        return getattr(transformers, self.config)(**(_IDS | {"num_labels": LABELS} | self.options | rates))


def _decoder(config: str, *dropouts: str, **options: Any) -> Tiny:
    return Tiny(config, _SIZES | _POSITIONS | options, dropouts)


_ENCODER = _SIZES | _POSITIONS
_ROBERTA = _SIZES | {"max_position_embeddings": POSITIONS + 1, "type_vocab_size": 2}
_DISTILBERT = {"dim": HIDDEN, "n_layers": 3, "n_heads": 4, "hidden_dim": 48} | _POSITIONS
_DEBERTA = _ENCODER | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "max_relative_positions": -1}
_DEBERTA |= {"position_biased_input": False, "type_vocab_size": 0, "pooler_hidden_size": HIDDEN}
_DEBERTA_V3 = _DEBERTA | {"position_buckets": 8, "norm_rel_ebd": "layer_norm", "share_att_key": True}
_MODERNBERT = _ENCODER | {"global_attn_every_n_layers": 2, "local_attention": 6, "cls_token_id": 1, "sep_token_id": 2}
_GPT2 = {"n_embd": HIDDEN, "n_layer": 3, "n_head": 4, "n_positions": POSITIONS}
_GPT2_DROPOUTS = ("attn_pdrop", "embd_pdrop", "resid_pdrop")
_OPT = {"hidden_size": HIDDEN, "num_hidden_layers": 3, "num_attention_heads": 4, "ffn_dim": 48} | _POSITIONS
_OPT |= {"word_embed_proj_dim": HIDDEN}
_GEMMA = {"head_dim": 8, "tie_word_embeddings": True} | _GROUPED
_LLAMA = _decoder("LlamaConfig", "attention_dropout", **_GROUPED)

TINY: dict[str, Tiny] = {
    "bert": Tiny("BertConfig", _ENCODER),
    "roberta": Tiny("RobertaConfig", _ROBERTA),
    "electra": Tiny("ElectraConfig", _ENCODER | {"embedding_size": 16}),
    "distilbert": Tiny("DistilBertConfig", _DISTILBERT, ("dropout", "attention_dropout", "seq_classif_dropout")),
    "deberta-v2": Tiny("DebertaV2Config", _DEBERTA),
    "deberta-v3": Tiny("DebertaV2Config", _DEBERTA_V3),
    "modernbert": Tiny("ModernBertConfig", _MODERNBERT, ("attention_dropout", "embedding_dropout", "mlp_dropout")),
    "gpt2": Tiny("GPT2Config", _GPT2, _GPT2_DROPOUTS),
    "gpt2-untied": Tiny("GPT2Config", _GPT2 | {"tie_word_embeddings": False}, _GPT2_DROPOUTS),
    "gpt-neox": _decoder("GPTNeoXConfig", "attention_dropout", "hidden_dropout"),
    "opt": Tiny("OPTConfig", _OPT, ("dropout", "attention_dropout")),
    "opt-projected": Tiny("OPTConfig", _OPT | {"word_embed_proj_dim": 16}, ("dropout", "attention_dropout")),
    "llama": _LLAMA,
    "llama-tied": _decoder("LlamaConfig", "attention_dropout", tie_word_embeddings=True, **_GROUPED),
    "mistral": _decoder("MistralConfig", "attention_dropout", **_GROUPED, **_SLIDING),
    "qwen2": _decoder("Qwen2Config", "attention_dropout", **_GROUPED, **_SLIDING, use_sliding_window=True, max_window_layers=1),
    "qwen3": _decoder("Qwen3Config", "attention_dropout", **_GROUPED, head_dim=8),
    "gemma": _decoder("GemmaConfig", "attention_dropout", **_GEMMA),
    "gemma2": _decoder("Gemma2Config", "attention_dropout", **_GEMMA, **_SLIDING, query_pre_attn_scalar=8),
    "gemma3": _decoder("Gemma3TextConfig", "attention_dropout", **_GEMMA, **_SLIDING, query_pre_attn_scalar=8),
    "phi": _decoder("PhiConfig", "attention_dropout", "embd_pdrop", "resid_pdrop"),
    "phi3": _decoder("Phi3Config", "attention_dropout", "embd_pdrop", "resid_pdrop", **_GROUPED),
    "smollm3": _decoder("SmolLM3Config", "attention_dropout", **_GROUPED),
}
"""Every family, with variants of it that are another path through the code."""

ENCODERS = ("bert", "roberta", "electra", "distilbert", "deberta-v2", "deberta-v3", "modernbert")
DECODERS = tuple(name for name in TINY if name not in ENCODERS)

TASKS = dict.fromkeys(ENCODERS, "sequence-classification") | dict.fromkeys(DECODERS, "causal-lm")
"""The usual task of each."""

AUTO_CLASSES = {task: auto_class(task) for task in get_args(Task)}

MODELS = ["bert", "gpt2", "gpt2-untied", "llama", "llama-tied"]
"""Those that stand for the others where the architecture does not matter."""

EVERY_TASK = [(name, task) for name in ENCODERS for task in ("sequence-classification", "token-classification", "masked-lm")]
EVERY_TASK += [(name, task) for name in DECODERS for task in ("causal-lm", "sequence-classification")]


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


@pytest.fixture(autouse=True)
def released_process_groups(world_of_one: None) -> Iterator[None]:
    """Every pipeline makes some, and each has threads that wake a hundred times a second."""
    groups._get_data_parallel_group()  # DeepSpeed makes a copy of the world once and remembers it: it has to stay
    before = set(dist.distributed_c10d._world.pg_map)
    yield
    groups.mpu = p2p._grid = None
    gc.collect()
    for group in set(dist.distributed_c10d._world.pg_map) - before:
        dist.destroy_process_group(group)


def tiny_config(name: str, *, dropout: float = 0.0) -> Any:
    return TINY[name].build(dropout)


def unsplit(
    name: str, *, task: str | None = None, attn: str | None = None, dropout: float = 0.0, dtype: torch.dtype = torch.float32
) -> Any:
    """The transformers model with weights worth comparing: also biases and norms are random."""
    torch.manual_seed(0)
    config = tiny_config(name, dropout=dropout)
    factory = auto_class(task or TASKS[name])
    model = factory.from_config(config, dtype=dtype, **({"attn_implementation": attn} if attn else {}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def make_batch(name: str, padding: str = "right", batch: int = 4, length: int = 11, task: str | None = None) -> tuple[Any, ...]:
    """input_ids, attention_mask, labels; the samples have different lengths."""
    generator = torch.Generator().manual_seed(7)
    task = task or TASKS[name]
    ids = torch.randint(3, VOCABULARY, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(batch):
        padded = 0 if padding == "none" else 2 * row
        columns = slice(0, padded) if padding == "left" else slice(length - padded, length)
        mask[row, columns] = 0
    ids = ids * mask
    if task == "causal-lm":
        return ids, mask, ids.masked_fill(mask == 0, -100)
    if task == "sequence-classification":
        return ids, mask, torch.randint(0, LABELS, (batch,), generator=generator)
    classes = VOCABULARY if task == "masked-lm" else LABELS
    labels = torch.randint(0, classes, (batch, length), generator=generator)
    ignored = torch.rand(batch, length, generator=generator) < 0.5
    return ids, mask, labels.masked_fill((mask == 0) | ignored, -100)


def counted(task: str, mask: Any) -> Any:
    """Which logits are compared: of a sample, or of tokens that are no padding."""
    return slice(None) if task == "sequence-classification" else mask.bool()


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., tuple[Any, Path]]:
    """Write a tiny model as transformers does; return it with its folder."""

    def save(name: str, *, task: str | None = None, **options: Any) -> tuple[Any, Path]:
        model = unsplit(name, task=task)
        folder = tmp_path / f"{name}-source"
        model.save_pretrained(folder, **options)
        return model, folder

    return save
