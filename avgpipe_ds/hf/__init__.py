"""Hugging Face models as DeepSpeed pipelines, and back."""

from __future__ import annotations

from avgpipe_ds.hf.convert import to_pipeline
from avgpipe_ds.hf.export import save_pretrained
from avgpipe_ds.hf.families import supported_model_types
from avgpipe_ds.hf.losses import causal_lm_loss, sequence_classification_loss, token_loss
from avgpipe_ds.hf.module import HFPipelineModule
from avgpipe_ds.hf.tasks import Task

__all__ = [
    "HFPipelineModule",
    "Task",
    "causal_lm_loss",
    "save_pretrained",
    "sequence_classification_loss",
    "supported_model_types",
    "to_pipeline",
    "token_loss",
]
