"""A tokenizer whose tokens are bytes, made here: no download, and what comes out can be worked out by hand."""

import datasets
import pytest
from tokenizers import Tokenizer, processors
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

SPECIAL = {"eos_token": "<end>", "pad_token": "<pad>", "mask_token": "<mask>", "cls_token": "<cls>", "sep_token": "<sep>"}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path / "cache" / "avgpipe_ds"


@pytest.fixture
def byte_tokenizer():
    """Makes tokenizers: a letter is a token, whose id is its code; the given special tokens follow behind 255."""

    def make(*special, wrap=False, **options):
        symbols = sorted(ByteLevel.alphabet())
        order = ByteLevel(add_prefix_space=False)
        vocabulary = dict.fromkeys(symbols, -1)
        printable = {chr(code): code for code in range(33, 127)} | {"\u0120": 32, "\u010a": 10}
        free = iter(sorted(set(range(256)) - set(printable.values())))
        for symbol in symbols:
            vocabulary[symbol] = printable[symbol] if symbol in printable else next(free)
        tokens = [SPECIAL[name] for name in special]
        tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
        tokenizer.pre_tokenizer, tokenizer.decoder = order, ByteLevelDecoder()
        tokenizer.add_special_tokens(tokens)
        if wrap:
            pairs = [(token, tokenizer.token_to_id(token)) for token in ("<cls>", "<sep>")]
            tokenizer.post_processor = processors.TemplateProcessing(
                single="<cls> $A <sep>", pair="<cls> $A <sep> $B:1 <sep>:1", special_tokens=pairs
            )
        names = {name: SPECIAL[name] for name in special}
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names, **options)

    return make
