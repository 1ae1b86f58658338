"""What can be wrong with samples for a model, found before anything is trained.

Later it would be an index error on one stage, or worse, a model that learns nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from avgpipe_ds.data.columns import column_values
from avgpipe_ds.data.samples import DrawnAnew, Sample, Samples, lengths_of
from avgpipe_ds.errors import DataError
from avgpipe_ds.hf.tasks import Task

__all__ = ["check_against_model", "check_samples", "num_positions"]

_KINDS = {
    "class": "a class for every sample",
    "token labels": "a label for every token",
    "masked": "tokens to be masked",
    "text": "tokens alone",
}
_KINDS_OF_TASK: dict[Task, tuple[str, ...]] = {
    "sequence-classification": ("class",),
    "token-classification": ("token labels",),
    "masked-lm": ("masked",),
    "causal-lm": ("text", "token labels"),
}


def check_samples(samples: Any, task: Task, *, name: str) -> None:
    """Whether they are samples, and of this task.

    Args:
        samples: of `avgpipe_ds.data`.
        task: of the model.
        name: of the argument that they were given as.

    Raises:
        DataError: they are not; it says what to do.

    """
    if not isinstance(samples, Sequence) or (len(samples) and not isinstance(samples[0], Sample)):
        raise DataError(
            f"{name}: expected tokenised samples, such as avgpipe_ds.data.tokenise(...).train, got a {type(samples).__name__}."
        )
    if not len(samples):
        raise DataError(f"{name}: there is no sample in it.")
    if task not in _KINDS_OF_TASK:
        return  # to_pipeline says so
    kind, expected = _kind_of(samples), _KINDS_OF_TASK[task]
    if kind not in expected:
        wanted = " or ".join(_KINDS[one] for one in expected)
        raise DataError(
            f"{name}: the task {task!r} needs {wanted}, but these samples have {_KINDS[kind]}: tokenise them for this task, or"
            " choose another task."
        )


def check_against_model(samples: Sequence[Sample], config: Any, tokenizer: Any, task: Task, *, name: str) -> None:
    """Whether they fit into the model: as many positions as tokens, as many classes as labels.

    Args:
        samples: that `check_samples` found good.
        config: of the model.
        tokenizer: of the model.
        task: of the model.
        name: of the argument that they were given as.

    Raises:
        DataError: they do not; it names a sample.

    """
    lengths, limit = lengths_of(samples), num_positions(config, tokenizer)
    longest = max(range(len(lengths)), key=lambda number: lengths[number])
    if limit is not None and lengths[longest] > limit:
        raise DataError(
            f"{name}: sample {longest} has {lengths[longest]} tokens, and the model has {limit} positions: tokenise with"
            f" max_length={limit} and truncate=True."
        )
    if task == "sequence-classification":
        labels: list[Any] = (
            column_values(samples.table, "labels") if isinstance(samples, Samples) else [each.labels for each in samples]
        )
        highest = max(range(len(labels)), key=lambda number: labels[number])
        if labels[highest] >= config.num_labels:
            raise DataError(
                f"{name}: sample {highest} is of class {labels[highest]}, and the model has the classes 0 to"
                f" {config.num_labels - 1}: pass id2label=dict(enumerate(label_names))."
            )


def num_positions(config: Any, tokenizer: Any) -> int | None:
    """The longest sample that a model takes, in tokens, as its config and its tokenizer say; None if neither does."""
    said = (getattr(config, "max_position_embeddings", None), tokenizer.model_max_length)
    # Models with relative positions say -1 or 0, tokenizers without a limit say 10^30.
    return min((limit for limit in said if limit is not None and 0 < limit < 10**9), default=None)


def _kind_of(samples: Sequence[Sample]) -> str:
    if isinstance(samples, DrawnAnew):
        return "masked"
    labels = samples[0].labels
    if labels is None:
        return "text"
    return "class" if isinstance(labels, int) else "token labels"
