"""GPT-2: learned positions, the head tied to the word embedding."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn
from transformers.masking_utils import create_causal_mask
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from avgpipe_ds.hf.families.base import DecoderFamily
from avgpipe_ds.hf.plan import Context, Flow, LayerPlan


class GPT2Positions(nn.Module):
    """Add learned positions. A layer of its own, so that tying the word embedding does not drag them to the last stage."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.wpe = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.drop = nn.Dropout(config.embd_pdrop)

    def forward(self, inputs: Flow) -> Flow:
        """Positions count from the first token, padding or not, as `GPT2LMHeadModel` does."""
        hidden_states, attention_mask = inputs
        positions = self.wpe(torch.arange(hidden_states.shape[1], device=hidden_states.device))
        return self.drop(hidden_states + positions), attention_mask


class GPT2(DecoderFamily):
    """`GPT2LMHeadModel`."""

    model_type = "gpt2"
    embedding_name = "transformer.wte."
    blocks_name = "transformer.h."
    norm_name = "transformer.ln_f."

    def check(self, config: Any) -> None:
        """Refuse cross-attention: there is no encoder to attend to."""
        if config.add_cross_attention:
            raise ValueError("expected a GPT-2 without cross-attention, got add_cross_attention: set it to false")

    def padding_idx(self, config: Any) -> int | None:
        """None: GPT-2 trains every row."""
        return None

    def input_plans(self, config: Any) -> list[LayerPlan]:
        """The learned positions."""
        return [LayerPlan(spec=LayerSpec(GPT2Positions, config), names={"wpe.": "transformer.wpe."}, is_lookup=True)]

    def block(self, config: Any, index: int) -> nn.Module:
        """`GPT2Block`."""
        block: nn.Module = GPT2Block(config, layer_idx=index)
        return block

    def final_norm(self, config: Any) -> nn.Module:
        """`ln_f`."""
        return nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)

    def context(self, config: Any, hidden_states: Tensor, attention_mask: Tensor) -> Context:
        """The causal mask in the form that the configured attention wants."""
        return (create_causal_mask(config, hidden_states, attention_mask, None),)

    def block_arguments(self, context: Context, index: int) -> dict[str, Any]:
        """The mask."""
        return {"attention_mask": context[0]}


FAMILY = GPT2()
