"""What is made of a row for each kind of training. Every task finds its columns and gives the encoder of the rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from avgpipe_ds.data.chat import Conversations, marks_answers
from avgpipe_ds.data.columns import LABELS, MESSAGES, TAGS, TEXTS, WORDS, choose_column, column_values
from avgpipe_ds.data.encoding import Limit, Rows
from avgpipe_ds.data.labels import Located, find_classes
from avgpipe_ds.data.masking import MaskableTexts, Masking
from avgpipe_ds.data.tables import Tables
from avgpipe_ds.data.texts import ClassifiedTexts, Documents, Texts
from avgpipe_ds.data.words import TaggedWords
from avgpipe_ds.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset

__all__ = ["TASKS", "CausalLM", "Chat", "MaskedLM", "Plan", "SequenceClassification", "Task", "TaskName", "TokenClassification"]

TaskName = Literal["sequence-classification", "token-classification", "masked-lm", "causal-lm", "chat"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How the rows of a data set are encoded.

    Attributes:
        encoder: of batches of rows.
        columns: that it needs, of every part.
        labels: whether samples have labels of their own: one for the sample, one for every token, or none.
        token_types: whether samples say which text of a pair a token belongs to.
        label_names: of the classes.
        masking: of a masked language model.

    """

    encoder: Callable[[Rows, list[int]], Rows]
    columns: tuple[str, ...]
    labels: Literal["sample", "token", "none"]
    token_types: bool = False
    label_names: tuple[str, ...] = ()
    masking: Masking | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceClassification:
    """A text, or a pair of texts, belongs to a class.

    Attributes:
        text: the column; None for one with a usual name, such as "text".
        pair: the column with the second text, if there is one.
        label: the column with the class; None for one with a usual name, such as "label".
        label_names: the names of the classes in the order of their ids; by default those that the data set declares, else all
            labels that occur, sorted.

    """

    text: str | None = None
    pair: str | None = None
    label: str | None = None
    label_names: Sequence[str] | None = None

    def plan(self, tables: Tables, tokenizer: Any, limit: Limit) -> Plan:
        """Find the columns and the classes."""
        _need_padding_token(tokenizer)
        text = choose_column(tables.train, self.text, usual=TEXTS, argument="text")
        pair = None if self.pair is None else choose_column(tables.train, self.pair, usual=(), argument="pair")
        label = choose_column(tables.train, self.label, usual=LABELS, argument="label")
        declared = self.label_names or _declared(tables.train, label)
        classes = find_classes(
            {part: enumerate(column_values(table, label)) for part, table in _with_columns(tables, label).items()},
            declared,
            column=label,
        )
        types = pair is not None and "token_type_ids" in tokenizer.model_input_names
        texts = (text,) if pair is None else (text, pair)
        encoder = ClassifiedTexts(tokenizer=tokenizer, limit=limit, texts=texts, token_types=types, label=label, classes=classes)
        return Plan(encoder=encoder, columns=(*texts, label), labels="sample", token_types=types, label_names=classes.names)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenClassification:
    """Every word has a tag.

    Attributes:
        words: the column with lists of words; None for one with a usual name, such as "tokens".
        tags: the column with lists of tags; None for one with a usual name, such as "ner_tags".
        label_names: as for `SequenceClassification`.

    """

    words: str | None = None
    tags: str | None = None
    label_names: Sequence[str] | None = None

    def plan(self, tables: Tables, tokenizer: Any, limit: Limit) -> Plan:
        """Find the columns and the classes."""
        if not getattr(tokenizer, "is_fast", False):
            raise DataError("Token classification needs a fast tokenizer, which knows the word of every token; this one is none.")
        words = choose_column(tables.train, self.words, usual=WORDS, argument="words")
        tags = choose_column(tables.train, self.tags, usual=TAGS, argument="tags")
        declared = self.label_names or _declared(tables.train, tags)
        parts = {part: _flat(column_values(table, tags)) for part, table in _with_columns(tables, tags).items()}
        classes = find_classes(parts, declared, column=tags)
        encoder = TaggedWords(tokenizer=tokenizer, limit=limit, words=words, tags=tags, classes=classes)
        return Plan(encoder=encoder, columns=(words, tags), labels="token", label_names=classes.names)


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedLM:
    """Some tokens of a text are hidden, others in every epoch, and are to be found.

    Attributes:
        text: the column; None for one with a usual name, such as "text".
        probability: the part of the tokens that is hidden.

    """

    text: str | None = None
    probability: float = 0.15

    def __post_init__(self) -> None:
        if not 0 < self.probability < 1:
            raise ValueError(f"probability must lie between 0 and 1, got {self.probability}")

    def plan(self, tables: Tables, tokenizer: Any, limit: Limit) -> Plan:
        """Find the column."""
        masking = Masking.of(tokenizer)
        text = choose_column(tables.train, self.text, usual=TEXTS, argument="text")
        encoder = MaskableTexts(tokenizer=tokenizer, limit=limit, text=text, probability=self.probability)
        return Plan(encoder=encoder, columns=(text,), labels="none", masking=masking)


@dataclass(frozen=True, slots=True, kw_only=True)
class CausalLM:
    """The next token is to be found.

    Attributes:
        text: the column; None for one with a usual name, such as "text".
        packing: whether rows are put one behind another and cut into blocks of `max_length` tokens; otherwise each is a sample.

    """

    text: str | None = None
    packing: bool = False

    def plan(self, tables: Tables, tokenizer: Any, limit: Limit) -> Plan:
        """Find the column."""
        text = choose_column(tables.train, self.text, usual=TEXTS, argument="text")
        if self.packing:
            return Plan(encoder=Documents(tokenizer=tokenizer, text=text), columns=(text,), labels="none")
        return Plan(encoder=Texts(tokenizer=tokenizer, limit=limit, text=text), columns=(text,), labels="none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """What the assistant says in a conversation is to be found, token by token.

    Attributes:
        messages: the column with lists of messages; None for one with a usual name, such as "messages".
        packing: as for `CausalLM`; a block may begin within a conversation.

    """

    messages: str | None = None
    packing: bool = False

    def plan(self, tables: Tables, tokenizer: Any, limit: Limit) -> Plan:
        """Find the column and the chat template."""
        marks_answers(tokenizer)
        messages = choose_column(tables.train, self.messages, usual=MESSAGES, argument="messages")
        encoder = Conversations(tokenizer=tokenizer, limit=None if self.packing else limit, messages=messages)
        return Plan(encoder=encoder, columns=(messages,), labels="token")


Task = SequenceClassification | TokenClassification | MaskedLM | CausalLM | Chat

#: Tasks with their defaults, by name.
TASKS: dict[TaskName, Task] = {
    "sequence-classification": SequenceClassification(),
    "token-classification": TokenClassification(),
    "masked-lm": MaskedLM(),
    "causal-lm": CausalLM(),
    "chat": Chat(),
}


def _with_columns(tables: Tables, column: str) -> dict[str, Dataset]:
    """The parts, all of which have the column."""
    for table in tables.parts().values():
        choose_column(table, column, usual=(), argument="column")
    return tables.parts()


def _flat(lists: Iterable[Any]) -> Iterator[Located]:
    """Every tag with its row; what is no list is left to the encoder, which says so."""
    return ((row, tag) for row, tags in enumerate(lists) if isinstance(tags, list) for tag in tags)


def _declared(table: Dataset, column: str) -> Sequence[str] | None:
    """The names of classes that a data set declares for a column, of labels or of lists of them."""
    feature = table.features[column]
    names: Sequence[str] | None = getattr(getattr(feature, "feature", feature), "names", None)
    return names


def _need_padding_token(tokenizer: Any) -> None:
    """A decoder that classifies looks at the last token that is no padding, so transformers has to know what padding is."""
    if tokenizer.pad_token_id is None:
        raise DataError(
            "The tokenizer has no padding token, which sequence classification needs: set tokenizer.pad_token ="
            " tokenizer.eos_token, and the model's config.pad_token_id = tokenizer.pad_token_id."
        )
