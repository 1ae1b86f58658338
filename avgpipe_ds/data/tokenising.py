"""From tables of rows to samples of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from avgpipe_ds.data.cached_map import cached_map
from avgpipe_ds.data.columns import choose_column, column_values
from avgpipe_ds.data.encoding import Limit
from avgpipe_ds.data.masking import MaskedSamples
from avgpipe_ds.data.packing import Packer
from avgpipe_ds.data.samples import Samples
from avgpipe_ds.data.splits import hold_out, hold_out_tail
from avgpipe_ds.data.suggest import did_you_mean
from avgpipe_ds.data.tables import Tables, load
from avgpipe_ds.data.tasks import TASKS, Plan, Task, TaskName
from avgpipe_ds.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset, Features

__all__ = ["Tokenised", "tokenise"]

#: Tokenizers without a limit have a huge one.
_NO_LIMIT = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenised:
    """Samples.

    Attributes:
        train: to train on.
        validation: to validate on, where the data set has such a part.
        label_names: of the classes, in the order of their ids.
        packed: whether samples are blocks of running text.

    """

    train: Samples | MaskedSamples
    validation: Samples | MaskedSamples | None = None
    label_names: tuple[str, ...] = ()
    packed: bool = False

    def with_validation(self, fraction: float) -> Tokenised:
        """These samples where there is a validation part; otherwise with one held out of those to train on.

        Of every class the same fraction; of running text the end, since a block's neighbours tell of it. Which samples they are
        depends on the data alone, so runs with other seeds validate on the same.

        Args:
            fraction: of the samples, above 0 and below 1.

        Raises:
            DataError: there is a single sample.
            ValueError: the fraction is impossible.

        """
        if not 0 < fraction < 1:
            raise ValueError(f"the fraction to hold out must lie between 0 and 1, got {fraction}")
        if self.validation is not None:
            return self
        if len(self.train) < 2:
            raise DataError("There is a single sample to train on, so none can be held out for validation.")
        if self.packed:
            train, validation = hold_out_tail(len(self.train), fraction)
        else:
            train, validation = hold_out(self._classes(), fraction)
        return replace(self, train=self.train.select(train), validation=self.train.select(validation))

    def _classes(self) -> Sequence[Any]:
        """The class of every sample; the same for all where they have none."""
        table = (self.train.samples if isinstance(self.train, MaskedSamples) else self.train).table
        single = "labels" in table.column_names and not isinstance(table[0]["labels"], list)
        return column_values(table, "labels") if single else [None] * len(table)


def tokenise(
    data: Tables | Dataset,
    tokenizer: Any,
    task: Task | TaskName,
    *,
    max_length: int | None = None,
    truncate: bool = False,
    num_proc: int | None = None,
    progress: bool = True,
) -> Tokenised:
    """Tokenise all rows. Every rank calls it and gets the same; of the ranks of a host, one does the work (see `cached_map`).

    Args:
        data: tables, or a table to train on.
        tokenizer: of the model, from transformers.
        task: what is made of a row; a name, or for other columns and options an object such as `CausalLM(packing=True)`.
        max_length: the longest sample, in tokens; by default what the tokenizer says of its model.
        truncate: whether to cut off what is longer; it is an error otherwise.
        num_proc: processes that tokenise. Fast tokenizers use all cores without that; conversations gain by it.
        progress: whether the process that does the work shows a bar.

    Raises:
        DataError: a row, a column or the tokenizer can't be used. The same on every rank.
        ValueError: `max_length` is below 2.

    """
    tables = data if isinstance(data, Tables) else load(data)
    if max_length is not None and max_length < 2:
        raise ValueError(f"max_length must be at least 2 tokens, got {max_length}")
    if max_length is None and tokenizer.model_max_length < _NO_LIMIT:
        max_length = tokenizer.model_max_length
    chosen = _task(task)
    packing = getattr(chosen, "packing", False)
    if max_length is None and (packing or truncate):
        raise DataError("Packing and truncation need max_length: the tokenizer does not say how long its model's samples may be.")
    plan = chosen.plan(tables, tokenizer, Limit(max_length=max_length, truncate=truncate))
    packer = Packer(max_length=max_length) if packing and max_length is not None else None
    parts = {
        part: _encode(table, part, plan, packer, tokenizer, num_proc=num_proc, progress=progress)
        for part, table in tables.parts().items()
    }
    return Tokenised(
        train=parts["training"],
        validation=parts.get("validation"),
        label_names=plan.label_names,
        packed=packer is not None,
    )


def _encode(
    table: Dataset, part: str, plan: Plan, packer: Packer | None, tokenizer: Any, *, num_proc: int | None, progress: bool
) -> Samples | MaskedSamples:
    for column in plan.columns:
        choose_column(table, column, usual=(), argument=f"column of the {part} data")
    try:
        encoded = cached_map(
            table.select_columns(list(dict.fromkeys(plan.columns))),
            plan.encoder,
            tokenizer=tokenizer,
            features=_features(plan, counted=packer is None or plan.labels == "token"),
            description=f"tokenising {part} data",
            progress=progress,
            num_proc=num_proc,
        )
    except DataError as error:
        raise DataError(f"The {part} data, {error}") from error
    if packer is not None:
        # In one process: where batches end, and with them blocks, must not depend on num_proc.
        features = _features(plan, counted=True)
        encoded = cached_map(
            encoded, packer, tokenizer=None, features=features, description=f"packing {part} data", progress=progress
        )
    if not len(encoded):
        raise DataError(f"The {part} data has no text.")
    samples = Samples(encoded)
    return samples if plan.masking is None else MaskedSamples(samples=samples, masking=plan.masking)


def _task(task: Task | TaskName) -> Task:
    if not isinstance(task, str):
        return task
    if task not in TASKS:
        raise DataError(f"Unknown task {task!r}.{did_you_mean(task, TASKS)} Known: {', '.join(map(repr, TASKS))}.")
    return TASKS[task]


def _features(plan: Plan, *, counted: bool) -> Features:
    """The columns of samples: small integers, since a data set may have billions of tokens."""
    from datasets import Features, List, Value

    tokens = List(Value("int32"))
    columns: dict[str, Any] = {"input_ids": tokens}
    if plan.labels != "none":
        columns["labels"] = tokens if plan.labels == "token" else Value("int32")
    if plan.token_types:
        columns["token_type_ids"] = List(Value("int8"))
    if counted:
        columns["num_targets"] = Value("int32")
    return Features(columns)
