"""Data sets, from files to the micro-batches that an engine takes.

    tables = data.load("reviews.csv").with_validation(0.1)
    tokens = data.tokenise(tables, tokenizer, "sequence-classification", max_length=128, truncate=True)
    batches = data.TrainingBatches(tokens.train, data.Collate.of(tokenizer, max_length=128), shape, epochs=2)

Nothing here knows of engines or processes. Names are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from avgpipe_ds.data.collate import Collate, MicroBatch
    from avgpipe_ds.data.evaluation import EvaluationBatches, evaluation_batches
    from avgpipe_ds.data.sampler import BatchShape
    from avgpipe_ds.data.samples import Sample, Samples
    from avgpipe_ds.data.tables import Tables, load
    from avgpipe_ds.data.tasks import CausalLM, Chat, MaskedLM, SequenceClassification, TokenClassification
    from avgpipe_ds.data.tokenising import Tokenised, tokenise
    from avgpipe_ds.data.training import TrainingBatches

__all__ = [
    "BatchShape",
    "CausalLM",
    "Chat",
    "Collate",
    "EvaluationBatches",
    "MaskedLM",
    "MicroBatch",
    "Sample",
    "Samples",
    "SequenceClassification",
    "Tables",
    "TokenClassification",
    "Tokenised",
    "TrainingBatches",
    "evaluation_batches",
    "load",
    "tokenise",
]

_HOMES = {
    "BatchShape": "sampler",
    "CausalLM": "tasks",
    "Chat": "tasks",
    "Collate": "collate",
    "EvaluationBatches": "evaluation",
    "MaskedLM": "tasks",
    "MicroBatch": "collate",
    "Sample": "samples",
    "Samples": "samples",
    "SequenceClassification": "tasks",
    "Tables": "tables",
    "TokenClassification": "tasks",
    "Tokenised": "tokenising",
    "TrainingBatches": "training",
    "evaluation_batches": "evaluation",
    "load": "tables",
    "tokenise": "tokenising",
}


def __getattr__(name: str) -> Any:
    import importlib

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
