"""The arguments of a training, with the names and defaults of `transformers.TrainingArguments`.

What has no meaning for pipelines (`fsdp`, `fp16_full_eval`, ...) is no field, so `HfArgumentParser` and Python refuse it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from transformers.trainer_utils import SchedulerType

__all__ = ["PipelineTrainingArguments", "Strategy"]

Strategy = Literal["no", "steps", "epoch"]
"""When something happens: never, every so many steps, or after each epoch."""

_MONITORS = ("tensorboard", "wandb", "csv", "comet")
_SCHEDULES_THAT_WATCH_A_METRIC = ("reduce_lr_on_plateau", "greedy")

_AT_LEAST = {
    "num_stages": 1,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "per_device_eval_batch_size": 1,
    "learning_rate": 0,
    "weight_decay": 0,
    "max_grad_norm": 0,
    "warmup_steps": 0,
    "warmup_ratio": 0,
    "save_total_limit": 1,
    "eval_delay": 0,
}


def _option(default: Any, explanation: str) -> Any:
    return field(default=default, metadata={"help": explanation})


@dataclass(kw_only=True)
class PipelineTrainingArguments:
    """What `PipelineTrainer` is told. A *step* is an engine iteration: each of N pipelines trains a batch.

    A batch is `per_device_train_batch_size * gradient_accumulation_steps` samples of each data-parallel replica. For
    `transformers.HfArgumentParser`, too. The meaning of every field is in its help text.

    Raises:
        ValueError: with every problem: the argument, what was expected, and what came.

    """

    output_dir: str = field(
        default="trainer_output", kw_only=False, metadata={"help": "Folder for checkpoints and trainer_state.json."}
    )
    num_stages: int | None = _option(None, "K, the stages of a pipeline, one accelerator each; by default as many as processes.")
    num_pipelines: int | str | None = _option(
        None, 'N, the pipelines that train, or "auto" to find it out; by default what --deepspeed says, else 1.'
    )
    partition: list[int] | None = _option(None, "K + 1 layer numbers where stages begin; by default balanced.")
    attn_implementation: str | None = _option(None, 'Attention of transformers: "eager", "sdpa", ...')
    gradient_checkpointing: bool = _option(False, "Recompute activations in backward: less memory, more time.")
    bf16: bool = _option(False, "Train in bfloat16, with an optimizer in fp32.")

    per_device_train_batch_size: int = _option(8, "Samples of a micro-batch.")
    gradient_accumulation_steps: int = _option(1, "M, the micro-batches of a batch; a pipeline wants several per stage.")
    per_device_eval_batch_size: int = _option(8, "Samples of a micro-batch of an evaluation.")
    group_by_length: bool = _option(False, "Samples of like length into a micro-batch, so that little is padded.")
    num_train_epochs: float = _option(3.0, "How often every sample is trained on.")
    max_steps: int = _option(-1, "Above 0: how many steps are trained, instead of num_train_epochs.")
    seed: int = _option(42, "Of the order of samples, dropout and new weights.")

    learning_rate: float = _option(5e-5, "Of AdamW, at its highest.")
    weight_decay: float = _option(0.0, "Of all weights but biases and norms.")
    adam_beta1: float = _option(0.9, "Of AdamW.")
    adam_beta2: float = _option(0.999, "Of AdamW.")
    adam_epsilon: float = _option(1e-8, "Of AdamW.")
    max_grad_norm: float = _option(1.0, "Gradients of a pipeline are clipped to this norm; 0: not at all.")
    lr_scheduler_type: str = _option("linear", f"One of {', '.join(kind.value for kind in SchedulerType)}.")
    warmup_steps: float = _option(0, "Steps of linear warm-up; below 1: their share of all steps.")
    warmup_ratio: float = _option(0.0, "Share of all steps that is warm-up; another way to say warmup_steps.")
    label_smoothing_factor: float = _option(0.0, "Share of each target that is spread evenly over all classes.")

    logging_strategy: Strategy = _option("steps", "When the loss is logged.")
    logging_steps: float = _option(500, "Steps between two logs; below 1: their share of all steps.")
    logging_first_step: bool = _option(False, "Log the first step, too.")
    report_to: list[str] | str = field(
        default_factory=list, metadata={"help": f"DeepSpeed's monitors that get the logs: {', '.join(_MONITORS)}."}
    )
    disable_tqdm: bool = _option(False, "Print logs instead of showing a bar.")

    eval_strategy: Strategy = _option("no", "When the reference model is evaluated.")
    eval_steps: float | None = _option(None, "Steps between two evaluations, below 1 their share; by default logging_steps.")
    eval_delay: float = _option(0, "Steps, or epochs, before the first evaluation.")

    save_strategy: Strategy = _option("steps", "When a checkpoint is written.")
    save_steps: float = _option(500, "Steps between two checkpoints; below 1: their share of all steps.")
    save_total_limit: int | None = _option(None, "Checkpoints to keep: the newest, and the best if that is to be loaded.")
    load_best_model_at_end: bool = _option(False, "Load the best checkpoint when training ends.")
    metric_for_best_model: str | None = _option(None, 'What "best" means; by default "loss".')
    greater_is_better: bool | None = _option(None, "By default, unless the metric's name ends in loss.")
    resume_from_checkpoint: str | None = _option(None, 'A checkpoint to continue from; "true" for the newest in output_dir.')

    deepspeed: dict[str, Any] | str | None = _option(
        None, 'More of DeepSpeed\'s configuration, as a JSON file; "auto" values are taken from here.'
    )
    local_rank: int = _option(-1, "Passed by the launcher, and not used.")

    def __post_init__(self) -> None:
        self.output_dir = os.path.expanduser(self.output_dir)
        if isinstance(self.num_pipelines, str) and self.num_pipelines.isdecimal():
            self.num_pipelines = int(self.num_pipelines)
        if isinstance(self.report_to, str):
            self.report_to = [self.report_to]
        if self.report_to == ["none"]:
            self.report_to = []
        if self.eval_strategy == "steps" and self.eval_steps is None:
            self.eval_steps = self.logging_steps
        if self.load_best_model_at_end and self.metric_for_best_model is None:
            self.metric_for_best_model = "loss"
        if self.greater_is_better is None and self.metric_for_best_model is not None:
            self.greater_is_better = not self.metric_for_best_model.endswith("loss")
        problems = [*self._wrong_values(), *self._contradictions()]
        if problems:
            raise ValueError("\n  ".join([f"{len(problems)} problem(s) in the arguments:", *problems]))

    def num_steps(self, steps_per_epoch: int) -> int:
        """Steps of the whole training."""
        return self.max_steps if self.max_steps > 0 else math.ceil(self.num_train_epochs * steps_per_epoch)

    def num_warmup_steps(self, num_steps: int) -> int:
        """Of `num_steps` those in which the learning rate rises."""
        warmup = self.warmup_steps or self.warmup_ratio
        return math.ceil(num_steps * warmup) if warmup < 1 else int(warmup)

    def _wrong_values(self) -> Iterator[str]:
        for name, least in _AT_LEAST.items():
            value = getattr(self, name)
            if value is not None and not value >= least:
                yield f"{name}: expected at least {least}, got {value}"
        for name in ("adam_beta1", "adam_beta2", "label_smoothing_factor"):
            if not 0 <= getattr(self, name) < 1:
                yield f"{name}: expected from 0 to below 1, got {getattr(self, name)}"
        if not (self.num_train_epochs > 0 or self.max_steps > 0):
            yield f"num_train_epochs: expected above 0, got {self.num_train_epochs}"
        if self.num_pipelines not in (None, "auto") and not (isinstance(self.num_pipelines, int) and self.num_pipelines >= 1):
            yield f'num_pipelines: expected an integer from 1 or "auto", got {self.num_pipelines!r}'
        if self.lr_scheduler_type not in {kind.value for kind in SchedulerType} - set(_SCHEDULES_THAT_WATCH_A_METRIC):
            known = [kind.value for kind in SchedulerType if kind.value not in _SCHEDULES_THAT_WATCH_A_METRIC]
            yield f"lr_scheduler_type: expected one of {', '.join(known)}, got {self.lr_scheduler_type!r}"
        if unknown := [name for name in self.report_to if name not in _MONITORS]:
            yield f"report_to: expected some of {', '.join(_MONITORS)}, got {', '.join(map(repr, unknown))}"
        for name in ("logging", "eval", "save"):
            strategy, steps = getattr(self, f"{name}_strategy"), getattr(self, f"{name}_steps")
            if strategy not in ("no", "steps", "epoch"):
                yield f'{name}_strategy: expected "no", "steps" or "epoch", got {strategy!r}'
            if strategy == "steps" and not (0 < steps < 1 or (steps >= 1 and steps == int(steps))):
                yield f"{name}_steps: expected an integer from 1, or a share of all steps below 1, got {steps}"

    def _contradictions(self) -> Iterator[str]:
        if self.eval_steps is not None and self.eval_strategy != "steps":
            yield f'eval_steps: expected eval_strategy="steps" with it, got {self.eval_strategy!r}'
        if self.warmup_steps and self.warmup_ratio:
            yield f"warmup_ratio: expected this or warmup_steps, got {self.warmup_ratio} and {self.warmup_steps}"
        if self.num_pipelines == "auto" and self.max_steps < 1:
            yield f'max_steps: expected above 0 with num_pipelines="auto", for each N makes other epochs, got {self.max_steps}'
        if self.load_best_model_at_end:
            if "no" in (self.eval_strategy, self.save_strategy) or self.eval_strategy != self.save_strategy:
                yield (
                    "load_best_model_at_end: expected eval_strategy and save_strategy to be the same, for only what was saved can"
                    f" be loaded, got {self.eval_strategy!r} and {self.save_strategy!r}"
                )
            elif self.eval_strategy == "steps" and _is_no_multiple(self.save_steps, self.eval_steps or 1):
                yield (
                    "load_best_model_at_end: expected save_steps to be a multiple of eval_steps, got"
                    f" {self.save_steps} and {self.eval_steps}"
                )


def _is_no_multiple(whole: float, part: float) -> bool:
    return not math.isclose(whole / part, round(whole / part)) or (whole < 1) != (part < 1)
