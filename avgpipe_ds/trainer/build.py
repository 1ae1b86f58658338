"""From what a user gives to an engine, its data, and how many steps there are.

Everything that can be wrong is found before the engine is built, and on every rank.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from transformers import PretrainedConfig, PreTrainedModel, get_scheduler, set_seed

from avgpipe_ds import hf
from avgpipe_ds.config import AvgPipeConfig
from avgpipe_ds.data import BatchShape, Collate, Sample, TrainingBatches
from avgpipe_ds.engine import AvgPipeEngine
from avgpipe_ds.hf.tasks import Task
from avgpipe_ds.initialization import init_distributed, initialize
from avgpipe_ds.trainer.agreement import on_every_rank
from avgpipe_ds.trainer.arguments import PipelineTrainingArguments
from avgpipe_ds.trainer.checks import check_against_model, check_samples, num_positions
from avgpipe_ds.trainer.deepspeed_config import deepspeed_config

if TYPE_CHECKING:
    from peft import PeftConfig

__all__ = ["Ingredients", "Model", "Parts", "build", "parameter_groups"]

Model: TypeAlias = str | Path | PreTrainedModel | PretrainedConfig
"""A hub name, a folder, a model in memory, or a config for random weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ingredients:
    """What the user of a trainer gives; see `PipelineTrainer`."""

    model: Model
    args: PipelineTrainingArguments
    task: Task
    train_dataset: Sequence[Sample]
    eval_dataset: Sequence[Sample] | None
    tokenizer: Any
    id2label: Mapping[int, str] | None
    peft_config: str | Path | PeftConfig | None

    @property
    def num_stages(self) -> int:
        """K."""
        return self.args.num_stages or dist.get_world_size()

    def check(self) -> dict[str, Any]:
        """Look at all but the model. Returns DeepSpeed's configuration.

        Raises:
            ValueError: something is wrong.

        """
        args, ranks = self.args, dist.get_world_size()
        if ranks % self.num_stages:
            raise ValueError(f"num_stages: expected it to divide the {ranks} processes, got {self.num_stages}")
        if args.eval_strategy != "no" and self.eval_dataset is None:
            raise ValueError(
                f"eval_dataset: expected one with eval_strategy={args.eval_strategy!r}, got None: pass it, or take out"
                " eval_strategy and eval_steps"
            )
        if self.tokenizer is None:
            raise ValueError("processing_class: expected the model's tokenizer, got None: it says how samples are padded")
        for name, samples in self._data_sets():
            check_samples(samples, self.task, name=name)
        Path(args.output_dir).mkdir(parents=True, exist_ok=True)
        if not os.access(args.output_dir, os.W_OK):
            raise ValueError(f"output_dir: expected a folder that can be written to, got {args.output_dir!r}")
        config = deepspeed_config(args, num_replicas=ranks // self.num_stages)
        AvgPipeConfig.from_deepspeed(config)
        return config

    def check_against(self, model_config: Any) -> None:
        """Look at the data with the model's eyes.

        Raises:
            ValueError: it does not fit.

        """
        for name, samples in self._data_sets():
            check_against_model(samples, model_config, self.tokenizer, self.task, name=name)

    def module(self) -> hf.HFPipelineModule:
        """The model as a pipeline. Every rank calls it.

        Raises:
            ValueError: as `to_pipeline`; or labels are to be smoothed that are no classes.

        """
        args = self.args
        module = hf.to_pipeline(
            self.model,
            num_stages=self.num_stages,
            task=self.task,
            id2label=self.id2label,
            pad_token_id=self.tokenizer.pad_token_id,
            attn_implementation=args.attn_implementation,
            partition=args.partition,
            activation_checkpoint_interval=int(args.gradient_checkpointing),
            peft=self.peft_config,
            seed=args.seed,
        )
        if args.label_smoothing_factor:
            loss_fn: Any = module.loss_fn
            if not is_dataclass(loss_fn) or not hasattr(loss_fn, "label_smoothing"):
                raise ValueError(
                    f"label_smoothing_factor: expected 0 with the loss {type(loss_fn).__name__}, whose targets are no exclusive"
                    f" classes, got {args.label_smoothing_factor}"
                )
            module.loss_fn = replace(loss_fn, label_smoothing=args.label_smoothing_factor)  # type: ignore[type-var]
        return module

    def _data_sets(self) -> Iterator[tuple[str, Sequence[Sample]]]:
        yield "train_dataset", self.train_dataset
        if self.eval_dataset is not None:
            yield "eval_dataset", self.eval_dataset


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a trainer works with.

    Attributes:
        engine: with N pipelines.
        batches: what it trains on.
        shape: how `batches` divides a step. While "auto" finds out N, data is planned for one pipeline, and N pipelines take N of
            its batches in a step.
        collate: makes tensors of samples.
        num_steps: of the whole training.

    """

    engine: AvgPipeEngine
    batches: TrainingBatches
    shape: BatchShape
    collate: Collate
    num_steps: int

    @property
    def epoch(self) -> float:
        """Epochs trained so far."""
        return self._planned_steps / self.batches.iterations_per_epoch

    @property
    def whole_epochs(self) -> int:
        """Without the one that has begun."""
        return self._planned_steps // self.batches.iterations_per_epoch

    @property
    def _planned_steps(self) -> int:
        return self.engine.consumed_micro_batches // self.shape.micro_batches_per_iteration


def build(given: Ingredients) -> Parts:
    """Every rank calls it.

    Raises:
        ValueError: on every rank, something that was given is wrong.

    """
    init_distributed()
    config = on_every_rank(given.check)
    module = given.module()
    on_every_rank(lambda: given.check_against(module.hf_config))
    args, block = given.args, AvgPipeConfig.from_deepspeed(config)
    shape = BatchShape(
        num_pipelines=block.first_num_pipelines,
        num_replicas=dist.get_world_size() // given.num_stages,
        num_micro_batches=args.gradient_accumulation_steps,
        micro_batch_size=args.per_device_train_batch_size,
    )
    num_steps = args.num_steps(shape.iterations_per_epoch(len(given.train_dataset)))
    schedule = partial(_schedule, args.lr_scheduler_type, args.num_warmup_steps(num_steps), num_steps)
    set_seed(args.seed)  # dropout
    engine, *_ = initialize(model=module, model_parameters=parameter_groups(module), lr_scheduler=schedule, config=config)
    collate = Collate.of(given.tokenizer, max_length=num_positions(module.hf_config, given.tokenizer))
    batches = TrainingBatches(
        given.train_dataset,
        collate,
        shape,
        replica=engine.grid.get_data_parallel_rank(),
        seed=args.seed,
        iterations=num_steps * (block.tuning.max_pipelines if block.num_pipelines == "auto" else 1),
        group_by_length=args.group_by_length,
    )
    return Parts(engine=engine, batches=batches, shape=shape, collate=collate, num_steps=num_steps)


def parameter_groups(module: torch.nn.Module) -> list[dict[str, Any]]:
    """What trains, in two groups: biases and norms, which are what has one dimension, do not decay, as with `Trainer`."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [parameter for parameter in trained if parameter.dim() > 1]},
        {"params": [parameter for parameter in trained if parameter.dim() <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _schedule(name: str, num_warmup_steps: int, num_steps: int, optimizer: torch.optim.Optimizer) -> Any:
    return get_scheduler(name, optimizer, num_warmup_steps=num_warmup_steps, num_training_steps=num_steps)
