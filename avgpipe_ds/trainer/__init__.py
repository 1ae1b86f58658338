"""For users of `transformers.Trainer`: the same names, on pipelines.

    args = PipelineTrainingArguments("out", num_pipelines=2, per_device_train_batch_size=4, gradient_accumulation_steps=4)
    trainer = PipelineTrainer(name, args, task="sequence-classification", train_dataset=tokens.train, processing_class=tokenizer)
    trainer.train()

Built on the public engine alone, which remains at hand as `trainer.engine`. Names are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from avgpipe_ds.trainer.arguments import PipelineTrainingArguments
    from avgpipe_ds.trainer.trainer import PipelineTrainer

__all__ = ["PipelineTrainer", "PipelineTrainingArguments"]

_HOMES = {"PipelineTrainer": "trainer", "PipelineTrainingArguments": "arguments"}


def __getattr__(name: str) -> Any:
    import importlib

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
