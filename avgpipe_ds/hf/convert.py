"""From a Hugging Face model to a DeepSpeed pipeline."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch
import torch.distributed as dist
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from avgpipe_ds.hf.adapters import open_adapters
from avgpipe_ds.hf.families import family_of
from avgpipe_ds.hf.layers import CallFinder
from avgpipe_ds.hf.losses import ProblemType, RegressionLoss, default_loss, problem_of
from avgpipe_ds.hf.module import HFPipelineModule
from avgpipe_ds.hf.plan import check_plan, cuts_of, parameter_counts, plan_layers
from avgpipe_ds.hf.shell import build_shell
from avgpipe_ds.hf.skeleton import only_calls
from avgpipe_ds.hf.sources import StateDictSource, WeightSource, open_pretrained
from avgpipe_ds.hf.tasks import CLASSIFICATIONS, Task
from avgpipe_ds.hf.weights import WeightLoader, with_buffers

if TYPE_CHECKING:
    from peft import PeftConfig

logger = logging.getLogger(__name__)


def to_pipeline(
    model_or_name: str | Path | PreTrainedModel | PretrainedConfig,
    *,
    num_stages: int,
    task: Task,
    num_labels: int | None = None,
    id2label: Mapping[int, str] | None = None,
    problem_type: ProblemType | None = None,
    pad_token_id: int | None = None,
    dtype: torch.dtype = torch.float32,
    attn_implementation: str | None = None,
    partition_method: str = "compute",
    partition: Sequence[int] | None = None,
    activation_checkpoint_interval: int = 0,
    loss_fn: Callable[..., Any] | None = None,
    peft: str | Path | PeftConfig | None = None,
    trust_remote_code: bool = False,
    seed: int = 1234,
) -> HFPipelineModule:
    """Make a Hugging Face model a `PipelineModule`. Every rank must call it, after `avgpipe_ds.init_distributed()`.

    A stage builds its own layers only and reads only their tensors. Micro-batches are `(inputs, labels)` with inputs
    `(input_ids, attention_mask)`, int64 `[batch, length]`; see `avgpipe_ds.hf.losses` for the labels.

    Args:
        model_or_name: a local folder or hub name; a model in memory, whose weights are copied; or a config, for random
            weights that depend on `seed` but not on `num_stages`.
        num_stages: K; must divide the number of ranks, the quotient being the data-parallel degree.
        task: which head; the family must support it.
        num_labels: classes of a classification head; default: that of `id2label`, or else of the config.
        id2label: names of the classes, written into the exported config.
        problem_type: what the labels of a sequence are, written into the exported config, too; default: that of the config, where
            one label is a number and several are exclusive classes.
        pad_token_id: of the tokenizer, for a model that classifies sequences and whose config has none. Written into the exported
            config.
        dtype: of the weights.
        attn_implementation: `"eager"`, `"sdpa"`, ...; default: transformers' choice.
        partition_method: `"compute"` balances the arithmetic of the stages (parameters that are multiplied with, so not
            embeddings), `"parameters"` all parameters; `"uniform"` and `"type:<regex>"` are DeepSpeed's.
        partition: K + 1 layer numbers where stages begin and the last one ends, such as `avgpipe-tune` proposes; instead of a
            method.
        activation_checkpoint_interval: recompute activations in backward, this many layers at a time; 0: keep them.
        loss_fn: `loss_fn(logits, labels)`, such as `TokenLoss(label_smoothing=0.1)`; it gives a scalar, or a pair of it and a
            dictionary of scalars to report. Default: that of the task and of `problem_type`.
        peft: adapters that are trained instead of the model: a config of the peft library, such as `LoraConfig`, or a folder that
            it has written.
        trust_remote_code: whether the model may bring Python code of its own, which then runs here.
        seed: for weights that are new.

    Raises:
        ValueError: the model, its task, labels, weights or number of stages cannot be; the same on every rank.
        RuntimeError: torch.distributed is not initialised.

    """
    _check_arguments(num_stages, task)
    config = _config_of(model_or_name, trust_remote_code=trust_remote_code)
    family = family_of(config)
    checkpoint_labels = config.num_labels
    if task in CLASSIFICATIONS:
        _set_labels(config, num_labels, id2label)
    _set_problem(config, task, problem_type)
    _set_padding(config, task, pad_token_id)
    loss_fn = loss_fn or default_loss(task, config)
    if isinstance(loss_fn, RegressionLoss):
        config.problem_type = "regression"  # as transformers' own training notes it: else its pipelines squash the numbers
    shell = build_shell(config, task, dtype, attn_implementation, trust_remote_code=trust_remote_code)
    adapters = None if peft is None else open_adapters(peft)
    if adapters is not None:
        adapters.inject(shell, task, config.name_or_path or None)
    finder = CallFinder(with_buffers(only_calls(shell, family), shell), family)
    finder.rehearse(config.hidden_size)
    plan = plan_layers(shell, family, finder)
    check_plan(plan, shell)
    most = len(cuts_of(plan)) - 1
    if num_stages > most:
        raise ValueError(
            f"expected at most {most} stages, one per block of this {config.model_type} and its two ends, "
            f"got num_stages={num_stages}"
        )
    other_classes = shell.config.num_labels != checkpoint_labels
    loader = WeightLoader(shell, plan, _source_of(model_or_name), adapters=adapters, replace_head=other_classes, seed=seed)
    if dist.get_rank() == 0:
        _report(loader, type(shell).__name__)
    return HFPipelineModule(
        plan,
        loader,
        hf_config=shell.config,
        task=task,
        adapters=adapters,
        parameter_counts=parameter_counts(plan, shell),
        num_stages=num_stages,
        loss_fn=loss_fn,
        partition_method=partition_method,
        partition=partition,
        activation_checkpoint_interval=activation_checkpoint_interval,
        seed=seed,
    )


def _check_arguments(num_stages: int, task: str) -> None:
    if task not in get_args(Task):
        raise ValueError(f"expected task to be one of {list(get_args(Task))}, got {task!r}")
    if not dist.is_initialized():
        raise RuntimeError("a PipelineModule needs torch.distributed: call avgpipe_ds.init_distributed() before to_pipeline()")
    world_size = dist.get_world_size()
    if num_stages < 1 or world_size % num_stages:
        raise ValueError(f"expected num_stages to divide the {world_size} ranks, got {num_stages}: start a multiple of it")


def _config_of(model_or_name: str | Path | PreTrainedModel | PretrainedConfig, *, trust_remote_code: bool) -> Any:
    """A private copy of the model's config."""
    if isinstance(model_or_name, PretrainedConfig):
        return copy.deepcopy(model_or_name)
    if isinstance(model_or_name, PreTrainedModel):
        return copy.deepcopy(model_or_name.config)
    name = str(model_or_name)
    if (isinstance(model_or_name, Path) or name.startswith((".", "/", "~"))) and not Path(name).is_dir():
        raise ValueError(f"expected a folder with a Hugging Face model, but {name!r} is none")
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"expected a folder or hub name with a config.json that transformers knows, got {name!r}: {error}"
        ) from error


def _source_of(model_or_name: str | Path | PreTrainedModel | PretrainedConfig) -> WeightSource | None:
    if isinstance(model_or_name, PretrainedConfig):
        return None
    if isinstance(model_or_name, PreTrainedModel):
        return StateDictSource(model_or_name.state_dict())
    return open_pretrained(str(model_or_name))


def _set_labels(config: Any, num_labels: int | None, id2label: Mapping[int, str] | None) -> None:
    if id2label is not None:
        if sorted(id2label) != list(range(len(id2label))) or num_labels not in (None, len(id2label)):
            raise ValueError(
                f"expected id2label to name the classes 0 to {(num_labels or len(id2label)) - 1}, got {dict(id2label)}"
            )
        config.id2label = dict(id2label)
        config.label2id = {label: index for index, label in id2label.items()}
    elif num_labels is not None and num_labels != config.num_labels:
        config.num_labels = num_labels


def _set_padding(config: Any, task: Task, pad_token_id: int | None) -> None:
    if task != "sequence-classification" or config.pad_token_id is not None:
        return  # and not to be changed: the padding token's row of the word embedding is not trained
    config.pad_token_id = pad_token_id
    if pad_token_id is None:
        raise ValueError(
            f"this {config.model_type} has no pad_token_id in its config, and can't tell where a sequence ends without: pass "
            "pad_token_id=tokenizer.pad_token_id (after tokenizer.pad_token = tokenizer.eos_token, if that has none either)"
        )


def _set_problem(config: Any, task: Task, problem_type: ProblemType | None) -> None:
    if problem_type is None:
        return
    if task != "sequence-classification":
        raise ValueError(f"problem_type is for sequence-classification, got {problem_type!r} with task {task!r}: leave it out")
    config.problem_type = problem_type
    problem_of(config)


def _report(loader: WeightLoader, model_class: str) -> None:
    if loader.new_names:
        logger.warning("%s: new weights, to be trained: %s", model_class, ", ".join(loader.new_names))
    if unused := loader.unused_names():
        logger.info("%s has no place for these weights, which are ignored: %s", model_class, ", ".join(unused))
