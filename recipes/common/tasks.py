"""From the two kinds of data set to samples: the step between reading and training."""

from typing import Any

from avgpipe_ds.data import CausalLM, Collate, SequenceClassification, Tokenised, tokenise
from avgpipe_ds.data.splits import thinned
from common.errors import RecipeError
from common.load import load_labelled, load_running_text
from common.models import load_tokenizer, positions
from common.narrator import Narrator
from common.options import DataOptions, RecipeOptions
from common.training import TaskData

__all__ = ["classification_task", "language_task"]


def classification_task(
    location: str, options: RecipeOptions, data: DataOptions, narrator: Narrator
) -> tuple[TaskData, list[str], Any]:
    """Read and tokenise labelled texts; return the samples, the names of the classes and the tokenizer.

    Raises:
        RecipeError, DataError: the model, the data set or one of its columns cannot be used; the same on every rank.

    """
    tokenizer = _tokenizer(location, options, narrator)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    with narrator.phase(f"reading {data.dataset}"):
        tables = load_labelled(data)
    task = SequenceClassification(text=data.text_column, label=data.label_column)
    with narrator.phase(f"tokenising {' and '.join(f'{len(table)} {part} texts' for part, table in tables.parts().items())}"):
        tokens = tokenise(tables, tokenizer, task, max_length=options.max_length, truncate=True, progress=False)
    return _task_data(tokens, tokenizer, options, data), list(tokens.label_names), tokenizer


def language_task(location: str, options: RecipeOptions, data: DataOptions, narrator: Narrator) -> tuple[TaskData, Any]:
    """Read running text and cut it into blocks of tokens; return them and the tokenizer.

    Raises:
        RecipeError, DataError: the model or the data set cannot be used; the same on every rank.

    """
    tokenizer = _tokenizer(location, options, narrator)
    with narrator.phase(f"reading {data.dataset}"):
        tables = load_running_text(data)
    task = CausalLM(text=data.text_column, packing=True)
    with narrator.phase(f"tokenising {len(tables.train)} documents"):
        tokens = tokenise(tables, tokenizer, task, max_length=options.max_length, progress=False)
    return _task_data(tokens, tokenizer, options, data), tokenizer


def _tokenizer(location: str, options: RecipeOptions, narrator: Narrator) -> Any:
    with narrator.phase(f"loading the tokenizer of {options.model}"):
        tokenizer = load_tokenizer(location)
        longest = positions(location)
    if longest is not None and options.max_length > longest:
        raise RecipeError(f"--max-length {options.max_length}: {options.model} has positions for {longest} tokens only.")
    return tokenizer


def _task_data(tokens: Tokenised, tokenizer: Any, options: RecipeOptions, data: DataOptions) -> TaskData:
    tokens = tokens.with_validation(data.validation_fraction)
    assert tokens.validation is not None  # one was held out
    return TaskData(
        train=tokens.train,
        validation=thinned(tokens.validation, options.max_validation_samples),
        collate=Collate.of(tokenizer, max_length=options.max_length),
    )
