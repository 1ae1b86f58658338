"""A small model for DeepSpeed's pipelines, and the same model in plain torch on one process.

Both are built layer by layer, each from its own seed, so weights do not depend on how layers are spread over stages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

FP16_SUPPORTED = bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
"""Whether DeepSpeed lets this CPU train in fp16."""

WIDTH = 16
CLASSES = 5
VOCABULARY = 11


class Layer(nn.Module):
    """Linear, tanh, and dropout if asked for."""

    def __init__(self, seed: int, dropout: float = 0.0, trains: bool = True) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.linear = nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            self.linear.weight.copy_(torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5)
            self.linear.bias.copy_(torch.randn(WIDTH, generator=generator) * 0.1)
        self.dropout = nn.Dropout(dropout)
        self.requires_grad_(trains)

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
    """What to train; subclasses bring other layers and data.

    Attributes:
        tied: embedding tied to the head across first and last stage; else plain regression.
        frozen: the layers, counted without embedding and head, that do not train.
    """

    num_layers: int = 4
    tied: bool = False
    dropout: float = 0.0
    micro_batch_size: int = 3
    length: int = 4
    frozen: tuple[int, ...] = ()

    def layers(self) -> list[Any]:
        """What a `PipelineModule` is made of."""
        from deepspeed.pipe import LayerSpec, TiedLayerSpec

        layers: list[Any] = [LayerSpec(Layer, seed, self.dropout, seed not in self.frozen) for seed in range(self.num_layers)]
        if self.tied:
            layers = [
                TiedLayerSpec("embedding", Embedding),
                *layers,
                TiedLayerSpec("embedding", Embedding, forward_fn=head),
            ]
        return layers

    @property
    def loss(self) -> Any:
        return token_loss if self.tied else nn.functional.mse_loss

    def data(self, seed: int = 1) -> Iterator[tuple[Any, Any]]:
        """Endless micro-batches."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            if self.tied:
                ids = torch.randint(VOCABULARY, (self.micro_batch_size, self.length), generator=generator)
                yield ids, torch.randint(VOCABULARY, (self.micro_batch_size, self.length), generator=generator)
            else:
                shape = (self.micro_batch_size, WIDTH)
                yield torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)

    def plain(self) -> Plain:
        """The model on one process."""
        return Plain(self.layers(), self.loss)

    def pipeline(self, num_stages: int, **options: Any) -> Any:
        """The model as a `PipelineModule` of `num_stages`; needs an initialised world."""
        from deepspeed.pipe import PipelineModule

        options.setdefault("partition_method", "uniform")
        return PipelineModule(self.layers(), num_stages=num_stages, loss_fn=self.loss, **options)


class Plain(nn.Module):
    """The layers of a pipeline as one module, called one after the other; names are those in a `PipelineModule`.

    Args:
        layers: specs, modules or functions.
        loss_fn: of (outputs, labels); None if the last layer returns the loss.
    """

    def __init__(self, layers: list[Any], loss_fn: Any) -> None:
        super().__init__()
        self.tied_modules = nn.ModuleDict()
        self.loss_fn = loss_fn
        self.functions: list[Any] = []
        for index, layer in enumerate(layers):
            key, module = getattr(layer, "key", None), layer.build() if hasattr(layer, "build") else layer
            if key is not None:
                if key not in self.tied_modules:
                    self.tied_modules[key] = module
                module = self.tied_modules[key]
                self.functions.append(module if layer.forward_fn is None else partial(layer.forward_fn, module))
                continue
            if isinstance(module, nn.Module):
                self.add_module(str(index), module)
            self.functions.append(module)

    def forward(self, inputs: Any, labels: Any) -> Tensor:
        """The loss of a micro-batch."""
        for function in self.functions:
            inputs = function(inputs)
        return inputs if self.loss_fn is None else self.loss_fn(inputs, labels)


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
    """A copy of a module's state, without the parameter that a stage with nothing to train gets for DeepSpeed's sake."""
    return {name: value.detach().clone() for name, value in module.state_dict().items() if name != "nothing_to_train"}


def merged(shards: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """State dicts of the stages as one; a tied weight must be the same on all that hold it."""
    whole: dict[str, Tensor] = {}
    for shard in shards:
        for name, value in shard.items():
            assert name not in whole or torch.equal(whole[name], value), f"copies of {name} differ"
            whole[name] = value
    return whole
