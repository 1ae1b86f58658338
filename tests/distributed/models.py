"""A small model for DeepSpeed's pipelines, and the same model in plain torch on one process.

Both are built layer by layer, each from its own seed, so weights do not depend on how layers are spread over stages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 16
CLASSES = 5
VOCABULARY = 11


class Layer(nn.Module):
    """Linear, tanh, and dropout if asked for."""

    def __init__(self, seed: int, dropout: float = 0.0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.linear = nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            self.linear.weight.copy_(torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5)
            self.linear.bias.copy_(torch.randn(WIDTH, generator=generator) * 0.1)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.tanh(self.linear(x)))


class Embedding(nn.Module):
    """Token embedding, mean over positions left to the loss; tied to the head."""

    def __init__(self, seed: int = 7) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(seed)) * 0.3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.weight[ids]


def head(module: Embedding, x: Tensor) -> Tensor:
    """Logits from the embedding's own weight."""
    return x @ module.weight.T


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy over all positions."""
    return nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))


@dataclass(frozen=True)
class Task:
    """What to train.

    Attributes:
        tied: embedding tied to the head across first and last stage; else plain regression.
    """

    num_layers: int = 4
    tied: bool = False
    dropout: float = 0.0
    micro_batch_size: int = 3
    length: int = 4

    def plain(self) -> nn.Module:
        """The model on one process."""
        return Plain(self)

    def pipeline(self, num_stages: int, **options: Any) -> Any:
        """The model as a `PipelineModule` of `num_stages`; needs an initialised world."""
        from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

        layers: list[Any] = [LayerSpec(Layer, seed, self.dropout) for seed in range(self.num_layers)]
        if self.tied:
            layers = [
                TiedLayerSpec("embedding", Embedding),
                *layers,
                TiedLayerSpec("embedding", Embedding, forward_fn=head),
            ]
        options.setdefault("partition_method", "uniform")
        return PipelineModule(layers, num_stages=num_stages, loss_fn=self.loss, **options)

    @property
    def loss(self) -> Any:
        return token_loss if self.tied else nn.functional.mse_loss

    def data(self, seed: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
        """Endless micro-batches."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            if self.tied:
                ids = torch.randint(VOCABULARY, (self.micro_batch_size, self.length), generator=generator)
                yield ids, torch.randint(VOCABULARY, (self.micro_batch_size, self.length), generator=generator)
            else:
                shape = (self.micro_batch_size, WIDTH)
                yield torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


class Plain(nn.Module):
    """The task's model as one module; parameter names differ from the pipeline's, see `pipeline_names`."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(seed, task.dropout) for seed in range(task.num_layers)])
        self.embedding = Embedding() if task.tied else None

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return x if self.embedding is None else head(self.embedding, x)

    def pipeline_names(self) -> dict[str, str]:
        """Names in the pipeline's state dict by names here."""
        shift = 0 if self.embedding is None else 1
        names = {}
        for name, _ in self.named_parameters():
            if name.startswith("layers."):
                _, index, rest = name.split(".", 2)
                names[name] = f"{int(index) + shift}.{rest}"
            else:
                names[name] = "tied_modules.embedding.weight"
        return names


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.01),
}


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        optimizer: key of `OPTIMIZERS`.
        config: more DeepSpeed configuration.
        avgpipe: the block; None leaves it out.
    """

    task: Task = field(default_factory=Task)
    num_stages: int = 2
    num_micro_batches: int = 4
    iterations: int = 3
    optimizer: str = "sgd"
    clipping: float = 0.0
    config: dict[str, Any] = field(default_factory=dict)
    avgpipe: dict[str, Any] | None = None
    module_options: dict[str, Any] = field(default_factory=dict)

    def deepspeed_config(self) -> dict[str, Any]:
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": self.task.micro_batch_size,
            "gradient_accumulation_steps": self.num_micro_batches,
            "gradient_clipping": self.clipping,
            "steps_per_print": 1000,
            **self.config,
        }
        if self.avgpipe is not None:
            config["avgpipe"] = self.avgpipe
        return config

    def engine(self) -> Any:
        """Our engine for this run; every rank calls it."""
        import avgpipe_ds

        torch.manual_seed(1234)
        module = self.task.pipeline(self.num_stages, **self.module_options)
        return avgpipe_ds.initialize(model=module, optimizer=OPTIMIZERS[self.optimizer], config=self.deepspeed_config())[0]

    def deepspeed_engine(self) -> Any:
        """DeepSpeed's own engine for this run; every rank calls it."""
        import deepspeed

        torch.manual_seed(1234)
        module = self.task.pipeline(self.num_stages, **self.module_options)
        parameters = [p for p in module.parameters() if p.requires_grad]
        config = self.deepspeed_config()
        config.pop("avgpipe", None)
        return deepspeed.initialize(
            model=module, optimizer=OPTIMIZERS[self.optimizer], model_parameters=parameters, config=config
        )[0]


def weights_of(module: Any) -> dict[str, Tensor]:
    """A copy of a module's state."""
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def merged(shards: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """State dicts of the stages as one; a tied weight must be the same on all that hold it."""
    whole: dict[str, Tensor] = {}
    for shard in shards:
        for name, value in shard.items():
            assert name not in whole or torch.equal(whole[name], value), f"copies of {name} differ"
            whole[name] = value
    return whole
