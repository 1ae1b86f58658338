"""Llama, and the models with its architecture (SmolLM2 among them)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import create_causal_mask
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from avgpipe_ds.hf.families.base import DecoderFamily
from avgpipe_ds.hf.plan import Context


class Llama(DecoderFamily):
    """`LlamaForCausalLM`."""

    model_type = "llama"

    def block(self, config: Any, index: int) -> nn.Module:
        """`LlamaDecoderLayer`."""
        block: nn.Module = LlamaDecoderLayer(config, index)
        return block

    def final_norm(self, config: Any) -> nn.Module:
        """`LlamaRMSNorm`."""
        norm: nn.Module = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        return norm

    def context(self, config: Any, hidden_states: Tensor, attention_mask: Tensor) -> Context:
        """The causal mask, and the cosines and sines of the positions."""
        mask = create_causal_mask(config, hidden_states, attention_mask, None)
        positions = torch.arange(hidden_states.shape[1], device=hidden_states.device).unsqueeze(0)
        # Built here and not kept as a module: DeepSpeed casts a module's buffers to bf16 or fp16 with its weights, and
        # frequencies of that precision put long sequences out of step. Building takes a few small operations.
        with torch.device(hidden_states.device):
            rotary = LlamaRotaryEmbedding(config)
        cos, sin = rotary(hidden_states, positions)
        return mask, cos, sin

    def block_arguments(self, context: Context, index: int) -> dict[str, Any]:
        """The mask and the rotary tables."""
        mask, cos, sin = context
        return {"attention_mask": mask, "position_embeddings": (cos, sin)}


FAMILY = Llama()
