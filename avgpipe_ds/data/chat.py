"""Conversations: a language model learns what the assistant says, given all that was said before.

Which tokens are the assistant's is known best by the tokenizer's chat template, if it marks them with `{% generation %}`. Most
don't. Then the conversation is tokenised up to each turn of the assistant, with the template's prompt for an answer, and up to
the end of that turn: what the latter has more is the turn. That only holds where each of these is a beginning of the whole;
some templates write earlier turns differently once there are later ones (they drop what the assistant had thought), and such a
conversation is refused rather than trained on with labels in the wrong places.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from avgpipe_ds.data.encoding import IGNORED, Limit, Rows, num_predicted
from avgpipe_ds.errors import DataError

__all__ = ["Conversations", "marks_answers"]

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversations:
    """A list of messages, each with `role` and `content`; the labels are the assistant's tokens.

    Attributes:
        tokenizer: with a chat template.
        limit: of the tokens of a conversation; None where conversations are to be packed.
        messages: the column.

    """

    tokenizer: Any = field(repr=False)
    limit: Limit | None
    messages: str

    def __call__(self, batch: Rows, rows: list[int]) -> Rows:
        """Columns of samples with a label for every token."""
        made: Rows = {"input_ids": [], "labels": [], "num_targets": []}
        for row, messages in zip(rows, batch[self.messages], strict=True):
            ids, labels = self._encode(row, _checked(messages, row, self.messages))
            targets = num_predicted(labels)
            if not targets:
                raise DataError(
                    f"row {row}: nothing that the assistant says is in its {len(ids)} tokens. Raise max_length or remove it."
                )
            for column, value in zip(made, (ids, labels, targets), strict=True):
                made[column].append(value)
        return made

    def _encode(self, row: int, messages: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
        if marks_answers(self.tokenizer):
            encoded = self.tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
            ids, answers = list(encoded["input_ids"]), list(encoded["assistant_masks"])
        else:
            ids, answers = self._by_prefixes(row, messages)
        labels = [token if answer else IGNORED for token, answer in zip(ids, answers, strict=True)]
        if self.limit is not None:
            return self.limit.cut(ids, row), labels[: self.limit.max_length]
        end = self.tokenizer.eos_token_id
        if end is not None and ids[-1] != end:
            return [*ids, end], [*labels, IGNORED]
        return ids, labels

    def _by_prefixes(self, row: int, messages: list[dict[str, Any]]) -> tuple[list[int], list[bool]]:
        """The tokens, and which of them are the assistant's."""
        if messages[0]["role"] == "assistant":
            raise DataError(f"row {row}: the assistant speaks first, without a prompt: put a system or user message before it.")
        whole = self._tokens(messages)
        answers = [False] * len(whole)
        for turn, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = self._tokens(messages[:turn], add_generation_prompt=True)
            answered = self._tokens(messages[: turn + 1])
            if answered[: len(prompt)] != prompt or whole[: len(answered)] != answered:
                raise DataError(
                    f"row {row}: which tokens are the assistant's can't be told: its turn, message {turn}, is written "
                    "differently within the whole conversation. Give the tokenizer a chat template that marks the assistant's"
                    " turns with {% generation %} ... {% endgeneration %}, or one conversation for each of its turns."
                )
            answers[len(prompt) : len(answered)] = [True] * (len(answered) - len(prompt))
        return whole, answers

    def _tokens(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        return list(self.tokenizer.apply_chat_template(messages, return_dict=True, **options)["input_ids"])


def marks_answers(tokenizer: Any) -> bool:
    """Whether the chat template marks what the assistant says.

    Raises:
        DataError: there is no chat template.

    """
    template = tokenizer.get_chat_template() if tokenizer.chat_template else None
    if template is None:
        raise DataError(
            "The tokenizer has no chat template, so conversations can't be written down. Take the tokenizer of a model that was"
            " tuned for conversations, or set tokenizer.chat_template."
        )
    return _GENERATION.search(template) is not None


def _checked(messages: Any, row: int, column: str) -> list[dict[str, Any]]:
    """The messages of a row, without the keys that only other rows have."""
    wanted = "a list of messages, each with 'role' and 'content'"
    if not isinstance(messages, list) or not messages:
        raise DataError(f"row {row}: column {column!r} must hold {wanted}, but holds {messages!r} there.")
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise DataError(f"row {row}: column {column!r} must hold {wanted}, but one of them is {message!r}.")
    if not any(message["role"] == "assistant" for message in messages):
        roles = ", ".join(message["role"] for message in messages)
        raise DataError(f"row {row}: no message has the role 'assistant', so there is nothing to learn; the roles are {roles}.")
    return [{key: value for key, value in message.items() if value is not None} for message in messages]
