"""BERT, and the many sentence encoders with its architecture (MiniLM among them)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deepspeed.pipe import LayerSpec
from torch import Tensor, nn
from transformers.masking_utils import create_bidirectional_mask
from transformers.models.bert.modeling_bert import BertEmbeddings, BertLayer, BertPooler

from avgpipe_ds.hf.families.base import Family
from avgpipe_ds.hf.layers import check_input
from avgpipe_ds.hf.plan import Context, Flow, LayerPlan, Task


class BertInput(nn.Module):
    """Word, position and token-type embeddings."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embeddings = BertEmbeddings(config)
        self.max_positions: int = config.max_position_embeddings

    def forward(self, inputs: tuple[Tensor, ...]) -> Flow:
        """`(input_ids, attention_mask[, token_type_ids])`, int64 `[batch, length]` -> `(hidden_states, attention_mask)`."""
        input_ids, attention_mask, *token_types = inputs
        check_input(input_ids, attention_mask, self.max_positions)
        token_type_ids = token_types[0] if token_types else None
        return self.embeddings(input_ids=input_ids, token_type_ids=token_type_ids), attention_mask


class BertClassifier(nn.Module):
    """Pool the first token and classify it."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        dropout = config.classifier_dropout if config.classifier_dropout is not None else config.hidden_dropout_prob
        self.pooler = BertPooler(config)
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)

    def forward(self, inputs: Flow) -> Tensor:
        """Logits `[batch, num_labels]`."""
        logits: Tensor = self.classifier(self.dropout(self.pooler(inputs[0])))
        return logits


class Bert(Family):
    """`BertForSequenceClassification`."""

    model_type = "bert"
    tasks = frozenset({"sequence-classification"})

    def check(self, config: Any) -> None:
        """Refuse the decoder variants, whose masks and cross-attention are other models."""
        if config.is_decoder or config.add_cross_attention:
            raise ValueError("expected a BERT encoder, got a config with is_decoder or add_cross_attention: set both to false")

    def plan(self, config: Any, task: Task) -> Sequence[LayerPlan]:
        """Embeddings, blocks, and pooler with classifier."""
        return [
            LayerPlan(spec=LayerSpec(BertInput, config), names={"embeddings.": "bert.embeddings."}, is_lookup=True),
            *self.block_plans(config, "bert.encoder.layer."),
            LayerPlan(
                spec=LayerSpec(BertClassifier, config),
                names={"pooler.": "bert.pooler.", "classifier.": "classifier."},
                is_head=True,
            ),
        ]

    def block(self, config: Any, index: int) -> nn.Module:
        """`BertLayer`."""
        block: nn.Module = BertLayer(config, layer_idx=index)
        return block

    def context(self, config: Any, hidden_states: Tensor, attention_mask: Tensor) -> Context:
        """The mask in the form that the configured attention wants."""
        return (create_bidirectional_mask(config, hidden_states, attention_mask),)

    def block_arguments(self, context: Context, index: int) -> dict[str, Any]:
        """The mask."""
        return {"attention_mask": context[0]}


FAMILY = Bert()
