"""What a family of models must tell to become a pipeline."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn

from avgpipe_ds.hf.layers import Block, FinalNorm, LMHead, WordEmbedding, tied_logits
from avgpipe_ds.hf.plan import Context, LayerPlan, Task


class Family(ABC):
    """An adapter for one `config.model_type`. It holds no state: one instance serves every model of the family."""

    model_type: ClassVar[str]
    tasks: ClassVar[frozenset[Task]]

    def check(self, config: Any) -> None:  # noqa: B027  (most families take every config)
        """Raise `ValueError` for a config of this family that cannot be a pipeline."""

    @abstractmethod
    def plan(self, config: Any, task: Task) -> Sequence[LayerPlan]:
        """The layers from token ids to logits. Together they must hold every tensor of the transformers model once."""

    @abstractmethod
    def block(self, config: Any, index: int) -> nn.Module:
        """Transformers' own module for block `index`."""

    @abstractmethod
    def context(self, config: Any, hidden_states: Tensor, attention_mask: Tensor) -> Context:
        """What blocks need beside `hidden_states`, from `hidden_states` `[batch, length, hidden]` and the 2-D mask.

        Called without gradients once per stage and micro-batch; must not be empty.
        """

    @abstractmethod
    def block_arguments(self, context: Context, index: int) -> dict[str, Any]:
        """Keyword arguments of block `index`, out of `context`."""

    def block_plans(self, config: Any, prefix: str) -> list[LayerPlan]:
        """The plans of all blocks; `prefix` is that of transformers' list of blocks, e.g. `"bert.encoder.layer."`."""
        return [
            LayerPlan(spec=LayerSpec(Block, self, config, index), names={"layer.": f"{prefix}{index}."})
            for index in range(config.num_hidden_layers)
        ]


class DecoderFamily(Family):
    """A decoder with a language-modelling head: embedding, blocks, norm, head, the embedding and the head maybe tied."""

    tasks = frozenset({"causal-lm"})

    #: Prefixes in the transformers model.
    embedding_name: ClassVar[str] = "model.embed_tokens."
    blocks_name: ClassVar[str] = "model.layers."
    norm_name: ClassVar[str] = "model.norm."
    head_name: ClassVar[str] = "lm_head."

    @abstractmethod
    def final_norm(self, config: Any) -> nn.Module:
        """Transformers' own norm after the last block."""

    def padding_idx(self, config: Any) -> int | None:
        """The row of the embedding that gets no gradient from look-ups."""
        index: int | None = config.pad_token_id
        return index

    def input_plans(self, config: Any) -> list[LayerPlan]:
        """Layers between the word embedding and the first block, such as learned positions."""
        return []

    def plan(self, config: Any, task: Task) -> Sequence[LayerPlan]:
        """Embedding, `input_plans`, blocks, norm and head."""
        embedding = (config.vocab_size, config.hidden_size, self.padding_idx(config), config.max_position_embeddings)
        if config.tie_word_embeddings:
            # Only the word embedding is shared: a copy of it, and of nothing else, also lives on the last stage.
            first = TiedLayerSpec("embed", WordEmbedding, *embedding)
            last = TiedLayerSpec("embed", WordEmbedding, *embedding, forward_fn=tied_logits)
        else:
            first = LayerSpec(WordEmbedding, *embedding)
            last = LayerSpec(LMHead, config.hidden_size, config.vocab_size)
        head_name = self.embedding_name if config.tie_word_embeddings else self.head_name
        return [
            LayerPlan(spec=first, names={"": self.embedding_name}, is_lookup=True),
            *self.input_plans(config),
            *self.block_plans(config, self.blocks_name),
            LayerPlan(spec=LayerSpec(FinalNorm, self, config), names={"norm.": self.norm_name}),
            LayerPlan(spec=last, names={"": head_name}, is_head=not config.tie_word_embeddings),
        ]
