"""The pipeline layers that families share.

Between two stages travel `(hidden_states, attention_mask)`: float `[batch, length, hidden]` and int64 `[batch, length]`.
Everything else that transformer blocks want (expanded masks, rotary tables) follows from these two, but costs several
kernels and, on a GPU, a device synchronisation. So the first block of a stage derives it once per micro-batch and the
tuple carries it from block to block; `HFPipelineModule.forward` drops it at the end of the stage. It is passed and not
cached on the module, because several micro-batches are under way at once and checkpointed blocks run again in backward.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from avgpipe_ds.hf.plan import Context, Flow

NUM_TRAVELLING = 2  # hidden_states and attention_mask


class BlockMaker(Protocol):
    """What blocks want of their family; see `families.base.Family`."""

    def block(self, config: Any, index: int) -> nn.Module:
        """Transformers' own module for block `index`."""

    def context(self, config: Any, hidden_states: Tensor, attention_mask: Tensor) -> Context:
        """What blocks need beside the hidden states."""

    def block_arguments(self, context: Context, index: int) -> dict[str, Any]:
        """Keyword arguments of block `index`."""


class NormMaker(Protocol):
    """What the final norm wants of its family."""

    def final_norm(self, config: Any) -> nn.Module:
        """Transformers' own norm after the last block."""


def check_input(input_ids: Tensor, attention_mask: Tensor, max_positions: int) -> None:
    """Raise `ValueError` for a sequence that the model has no positions for, or a mask of another shape than the ids."""
    if input_ids.shape != attention_mask.shape:
        raise ValueError(
            f"expected input_ids and attention_mask of one shape [batch, length], "
            f"got {tuple(input_ids.shape)} and {tuple(attention_mask.shape)}"
        )
    length = input_ids.shape[1]
    if length > max_positions:
        raise ValueError(
            f"the sequence is {length} tokens long, but the model has {max_positions} positions "
            f"(max_position_embeddings): truncate the input to {max_positions} tokens"
        )


class WordEmbedding(nn.Embedding):
    """Token ids to vectors; tied to an output head, also vectors to logits."""

    def __init__(self, num_embeddings: int, embedding_dim: int, padding_idx: int | None, max_positions: int) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx)
        self.max_positions = max_positions

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Flow:  # type: ignore[override]
        """`(input_ids, attention_mask)`, both int64 `[batch, length]` -> `(hidden_states, attention_mask)`."""
        input_ids, attention_mask = inputs
        check_input(input_ids, attention_mask, self.max_positions)
        return super().forward(input_ids), attention_mask


def tied_logits(embedding: WordEmbedding, inputs: Flow) -> Tensor:
    """The output head that shares the weight of `embedding`: logits `[batch, length, vocab]`."""
    return F.linear(inputs[0], embedding.weight)


class LMHead(nn.Linear):
    """An output head with a weight of its own: logits `[batch, length, vocab]`."""

    def __init__(self, hidden_size: int, vocab_size: int) -> None:
        super().__init__(hidden_size, vocab_size, bias=False)

    def forward(self, inputs: Flow) -> Tensor:  # type: ignore[override]
        """Take the hidden states out of the tuple; nothing below needs the rest."""
        return super().forward(inputs[0])


class Block(nn.Module):
    """One transformer block, with what it needs beside the hidden states."""

    def __init__(self, family: BlockMaker, config: Any, index: int) -> None:
        super().__init__()
        self.family, self.config, self.index = family, config, index
        self.layer = family.block(config, index)

    def forward(self, inputs: Flow) -> Flow:
        """`(hidden_states, attention_mask, *context)` -> the same; without a context it is derived first."""
        hidden_states, attention_mask, *carried = inputs
        context: Context = tuple(carried)
        if not context:
            with torch.no_grad():
                context = self.family.context(self.config, hidden_states, attention_mask)
        hidden_states = self.layer(hidden_states, **self.family.block_arguments(context, self.index))
        return (hidden_states, attention_mask, *context)


class FinalNorm(nn.Module):
    """The norm after the last block of a decoder."""

    def __init__(self, family: NormMaker, config: Any) -> None:
        super().__init__()
        self.norm = family.final_norm(config)

    def forward(self, inputs: Flow) -> Flow:
        """Normalise `hidden_states`, pass the rest on."""
        return (self.norm(inputs[0]), *inputs[1:])
