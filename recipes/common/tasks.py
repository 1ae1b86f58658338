"""From the two kinds of corpus to samples: the step between reading and training."""

from typing import Any

from common.batches import Collate
from common.errors import RecipeError
from common.load import load_classification, load_language
from common.models import load_tokenizer, positions
from common.narrator import Narrator
from common.options import DataOptions, RecipeOptions
from common.samples import Sample, blocks_of_text, hold_out_tail, labelled_samples
from common.splits import thinned
from common.training import TaskData

__all__ = ["classification_task", "language_task"]


def classification_task(
    location: str, options: RecipeOptions, data: DataOptions, narrator: Narrator
) -> tuple[TaskData, list[str], Any]:
    """Read and tokenise labelled texts; return the samples, the names of the classes and the tokenizer.

    Raises:
        RecipeError: the model, the data set or one of its columns cannot be used; the same on every rank.

    """
    tokenizer = _tokenizer(location, options, narrator)
    with narrator.phase(f"reading {data.dataset}"):
        corpus = load_classification(data)
    with narrator.phase(
        f"tokenising {len(corpus.train.texts)} texts to train on and {len(corpus.validation.texts)} to validate on"
    ):
        train = labelled_samples(corpus.train, tokenizer, max_length=options.max_length)
        validation = labelled_samples(corpus.validation, tokenizer, max_length=options.max_length)
    return _task_data(train, validation, tokenizer, options), list(corpus.label_names), tokenizer


def language_task(location: str, options: RecipeOptions, data: DataOptions, narrator: Narrator) -> tuple[TaskData, Any]:
    """Read running text and cut it into blocks of tokens; return them and the tokenizer.

    Raises:
        RecipeError: the model or the data set cannot be used; the same on every rank.

    """
    tokenizer = _tokenizer(location, options, narrator)
    with narrator.phase(f"reading {data.dataset}"):
        corpus = load_language(data)
    with narrator.phase(f"tokenising {sum(map(len, corpus.train)) / 1e6:.1f} million characters"):
        train = blocks_of_text(corpus.train, tokenizer, max_length=options.max_length)
        if corpus.validation is not None:
            validation = blocks_of_text(corpus.validation, tokenizer, max_length=options.max_length)
        else:
            train, validation = hold_out_tail(train, data.validation_fraction)
    return _task_data(train, validation, tokenizer, options), tokenizer


def _tokenizer(location: str, options: RecipeOptions, narrator: Narrator) -> Any:
    with narrator.phase(f"loading the tokenizer of {options.model}"):
        tokenizer = load_tokenizer(location)
        longest = positions(location)
    if longest is not None and options.max_length > longest:
        raise RecipeError(f"--max-length {options.max_length}: {options.model} has positions for {longest} tokens only.")
    return tokenizer


def _task_data(train: list[Sample], validation: list[Sample], tokenizer: Any, options: RecipeOptions) -> TaskData:
    if not train or not validation:
        raise RecipeError(
            f"There are {len(train)} samples to train on and {len(validation)} to validate on; each needs at least one."
            " Is the text long enough, and --validation-fraction neither too small nor too large?"
        )
    # A model without a padding token (GPT-2, Llama) never sees one either: padding is masked, so any id will do.
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    collate = Collate(pad_token_id=pad, max_length=options.max_length)
    return TaskData(train=train, validation=thinned(validation, options.max_validation_samples), collate=collate)
