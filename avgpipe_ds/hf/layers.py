"""The pipeline layers, the same for all architectures.

    Words -> Before -> Block ... Block -> [TiedWords ->] After

A micro-batch enters as `(input_ids, attention_mask[, third])`, int64 `[batch, length]`. Between two stages travel
`(hidden_states, attention_mask, *more)`: float `[batch, length, hidden]`, the mask as it came, and what else the blocks can't do
without: position ids, if there were some, or embeddings of relative positions. Everything else that blocks want (expanded
masks, rotary tables) follows from these, but costs several kernels and, on a GPU, a synchronisation. So the first block of a
stage finds it out once per micro-batch, and the tuple carries it from block to block; `HFPipelineModule.forward` drops it at
the end of the stage. It is passed and not kept in the module, because several micro-batches are under way at once, and
checkpointed blocks run again in backward.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from avgpipe_ds.hf.families import Family
from avgpipe_ds.hf.skeleton import Calls, Skeleton, materialise

__all__ = ["After", "Before", "Block", "CallFinder", "Flow", "Words", "hand_on_weight", "travelling"]

Flow = tuple[Any, ...]
"""What one layer hands to the next: `(hidden_states, attention_mask, *more[, calls])`."""


def travelling(flow: Flow) -> Flow:
    """The tensors of a flow, without what the next stage finds out by itself."""
    return flow[:-1] if isinstance(flow[-1], Calls) else flow


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


class Words(nn.Module):
    """The word embedding, by itself: a head may be tied to it, and then this and nothing else also lives on the last stage."""

    def __init__(self, embedding: nn.Module, max_positions: int) -> None:
        """`embedding`: transformers' own, on the meta device; copied."""
        super().__init__()
        self.embedding = copy.deepcopy(embedding)
        self.max_positions = max_positions
        materialise(self)

    def forward(self, inputs: tuple[Tensor, ...]) -> Flow:
        """`(input_ids, attention_mask[, third])` -> `(embedded, input_ids, attention_mask[, third])`."""
        input_ids, attention_mask = inputs[:2]
        check_input(input_ids, attention_mask, self.max_positions)
        return (self.embedding(input_ids), *inputs)


def hand_on_weight(words: Words, inputs: Flow) -> Flow:
    """Before a head that is tied to the word embedding: `(weight, hidden_states, attention_mask, ...)`."""
    return (words.embedding.weight, *travelling(inputs))


class Before(nn.Module):
    """All between the word embedding and the first block: positions, norms, projections, dropout."""

    def __init__(self, skeleton: Skeleton, family: Family) -> None:
        """`skeleton`: of `only_before`; copied."""
        super().__init__()
        self.skeleton = copy.deepcopy(skeleton)
        self.family = family
        materialise(self)

    def forward(self, inputs: Flow) -> Flow:
        """`(embedded, input_ids, attention_mask[, third])` -> `(hidden_states, attention_mask, *more)`.

        How the blocks are called is not taken from here: DeepSpeed has cast the buffers of this module.
        """
        embedded, input_ids, attention_mask, *third = inputs
        optional = dict(zip([self.family.third_input], third, strict=False))
        _, hidden_states, calls = self.skeleton.run(
            embedded=embedded, input_ids=input_ids, attention_mask=attention_mask, **optional
        )
        more = [optional["position_ids"]] if "position_ids" in optional else []
        if self.family.shared is not None:
            more = [calls.arguments[0][1][self.family.shared]]
        return (hidden_states, attention_mask, *more)


class CallFinder:
    """Finds out how transformers calls the blocks. No module: DeepSpeed casts the buffers of modules to bf16 or fp16 with
    the weights, and rotary frequencies of that precision put long sequences out of step.
    """

    def __init__(self, skeleton: Skeleton, family: Family) -> None:
        """`skeleton`: of `only_calls`, with its buffers filled."""
        self._skeleton, self._family = skeleton, family

    def rehearse(self, hidden_size: int) -> None:
        """Find it out once for hidden states of no account.

        Raises:
            RuntimeError: something with weights runs before the blocks, of which the family does not know.

        """
        self.calls(
            torch.zeros(1, 2, hidden_size),
            torch.ones(1, 2, dtype=torch.int64),
            [torch.zeros(2, 1)] if self._family.shared else [],
        )

    @torch.no_grad()
    def calls(self, hidden_states: Tensor, attention_mask: Tensor, more: Sequence[Tensor]) -> Calls:
        """For hidden states `[batch, length, hidden]` that come to a stage, with what travels beside them."""
        if any(buffer.device != hidden_states.device for buffer in self._skeleton.buffers()):
            self._skeleton.to(hidden_states.device)
        shared = self._family.shared
        positions = {"position_ids": more[0]} if more and shared is None else {}
        nothing = torch.zeros_like(attention_mask)
        _, _, calls = self._skeleton.run(embedded=hidden_states, input_ids=nothing, attention_mask=attention_mask, **positions)
        if shared is not None:
            for _, keywords in calls.arguments:
                keywords[shared] = more[0]
        return calls


class Block(nn.Module):
    """One transformer block."""

    def __init__(self, layer: nn.Module, index: int, finder: CallFinder) -> None:
        """`layer`: transformers' own, on the meta device; copied."""
        super().__init__()
        self.layer = copy.deepcopy(layer)
        self.index, self.finder = index, finder
        materialise(self)

    def forward(self, inputs: Flow) -> Flow:
        """`(hidden_states, attention_mask, *more[, calls])` -> the same with `calls`."""
        hidden_states, attention_mask, *more = travelling(inputs)
        calls = inputs[-1] if isinstance(inputs[-1], Calls) else self.finder.calls(hidden_states, attention_mask, more)
        arguments, keywords = calls.arguments[self.index]
        output = self.layer(hidden_states, *arguments, **keywords)
        return (output[0] if isinstance(output, tuple) else output, attention_mask, *more, calls)


class After(nn.Module):
    """All after the last block: norm, pooling, head."""

    def __init__(self, skeleton: Skeleton, tied: Sequence[str], pad_token_id: int | None) -> None:
        """`skeleton`: of `only_after`; copied. `tied`: the names in it of the weights that the word embedding has."""
        super().__init__()
        self.skeleton = copy.deepcopy(skeleton)
        self.tied, self.pad_token_id = tuple(tied), pad_token_id
        materialise(self)

    def forward(self, inputs: Flow) -> Tensor:
        """`([weight,] hidden_states, attention_mask, ...)` -> logits, as transformers returns them."""
        weight, *flow = travelling(inputs) if self.tied else (None, *travelling(inputs))
        hidden_states, attention_mask = flow[:2]
        self._use(weight)
        try:
            output, _, _ = self.skeleton.run(
                embedded=hidden_states,
                hidden=hidden_states,
                input_ids=self._stand_in_ids(attention_mask),
                attention_mask=attention_mask,
            )
        finally:
            self._use(None)
        logits: Tensor = output.logits
        return logits

    def _stand_in_ids(self, attention_mask: Tensor) -> Tensor:
        """Ids by which transformers finds the last token that is no padding, as it does to classify with a decoder."""
        pad = 0 if self.pad_token_id is None else self.pad_token_id
        return torch.where(attention_mask.bool(), int(pad == 0), pad)

    def _use(self, weight: Tensor | None) -> None:
        """Past `nn.Module.__setattr__`, which would make a parameter of this one: a parameter it is elsewhere."""
        for name in self.tied:
            path, _, attribute = name.rpartition(".")
            self.skeleton.model.get_submodule(path).__dict__[attribute] = weight
