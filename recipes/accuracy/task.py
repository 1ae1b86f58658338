"""The data and the initial model: the same for every contender."""

from dataclasses import dataclass
from typing import Any

import torch
from common.errors import RecipeError
from common.load import load_labelled
from common.models import load_tokenizer, model_location, positions
from common.narrator import Narrator
from common.options import DataOptions
from common.training import TaskData
from transformers import AutoModelForSequenceClassification
from transformers.utils import logging as transformers_logging

from accuracy.records import Conditions
from avgpipe_ds.data import Collate, tokenise
from avgpipe_ds.data.splits import thinned

__all__ = ["CLIPPING", "EVAL_MICRO_BATCH_SIZE", "WEIGHT_DECAY", "ClassificationTask", "load_task"]

WEIGHT_DECAY = 0.01
CLIPPING = 1.0
EVAL_MICRO_BATCH_SIZE = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassificationTask:
    """Samples, and the model to start from."""

    location: str
    num_classes: int
    data: TaskData

    def initial_model(self, seed: int) -> Any:
        """Return transformers' model with a new head; `seed` decides the head, and nothing else does."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return AutoModelForSequenceClassification.from_pretrained(
                self.location, num_labels=self.num_classes, dtype=torch.float32
            )


def load_task(conditions: Conditions, narrator: Narrator) -> ClassificationTask:
    """Read and tokenise; the validation samples are a draw that no seed of a run changes.

    Raises:
        RecipeError: the model or the data set cannot be used.

    """
    transformers_logging.set_verbosity_error()  # a report of the new head in every run
    transformers_logging.disable_progress_bar()
    location = model_location(conditions.model)
    tokenizer = load_tokenizer(location)
    longest = positions(location)
    if longest is not None and conditions.max_length > longest:
        raise RecipeError(f"--max-length {conditions.max_length}: {conditions.model} has positions for {longest} tokens only.")
    with narrator.phase(f"reading {conditions.dataset}"):
        options = DataOptions(dataset=conditions.dataset)
        tables = load_labelled(options)
    with narrator.phase(f"tokenising {sum(map(len, tables.parts().values()))} texts"):
        tokens = tokenise(
            tables,
            tokenizer,
            "sequence-classification",
            max_length=conditions.max_length,
            truncate=True,
            progress=False,
        ).with_validation(options.validation_fraction)
    validation = tokens.validation or ()
    if len(validation) < conditions.validation_samples:
        raise RecipeError(
            f"--validation-samples {conditions.validation_samples}: {conditions.dataset} has only {len(validation)} of them."
        )
    data = TaskData(
        train=tokens.train,
        validation=thinned(validation, conditions.validation_samples),
        collate=Collate.of(tokenizer, max_length=conditions.max_length),
    )
    return ClassificationTask(location=location, num_classes=len(tokens.label_names), data=data)
