"""The arguments of a training: their errors, how long it is, and how they meet a DeepSpeed configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import HfArgumentParser, TrainingArguments

from avgpipe_ds.config import AvgPipeConfig
from avgpipe_ds.errors import ConfigError
from avgpipe_ds.trainer import PipelineTrainingArguments
from avgpipe_ds.trainer.deepspeed_config import deepspeed_config

OWN = {"num_stages", "num_pipelines", "partition", "attn_implementation", "group_by_length", "warmup_ratio"}
OTHER_DEFAULTS = {"output_dir", "report_to", "disable_tqdm", "gradient_checkpointing"}


def parse(*argv: str) -> PipelineTrainingArguments:
    (args,) = HfArgumentParser(PipelineTrainingArguments).parse_args_into_dataclasses(list(argv))
    return args


def test_names_and_defaults_are_those_of_transformers() -> None:
    ours, theirs = vars(PipelineTrainingArguments()), vars(TrainingArguments(use_cpu=True))
    assert set(ours) - set(theirs) == OWN
    different = {name for name in ours.keys() & theirs.keys() if ours[name] != theirs[name]}
    assert different <= OTHER_DEFAULTS


def test_command_line() -> None:
    argv = (
        "--output_dir out --num_pipelines 3 --partition 0 4 9 --eval_strategy steps --eval_steps 20 --report_to csv wandb --bf16"
    )
    args = parse(*argv.split(), "--local_rank=1", "--resume_from_checkpoint", "true")
    assert (args.output_dir, args.num_pipelines, args.partition) == ("out", 3, [0, 4, 9])
    assert (args.eval_strategy, args.eval_steps, args.report_to, args.bf16) == ("steps", 20, ["csv", "wandb"], True)
    assert parse("--num_pipelines", "auto", "--max_steps", "5").num_pipelines == "auto"


@pytest.mark.parametrize("option", ["--fsdp", "--fp16_full_eval", "--torch_compile", "--tp_size"])
def test_what_has_no_meaning_here_is_refused(option: str) -> None:
    with pytest.raises(ValueError, match=f"not used by the HfArgumentParser: .*{option}"):
        parse(option, "1")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"num_pipelines": 0}, 'num_pipelines: expected an integer from 1 or "auto", got 0'),
        ({"num_pipelines": "many"}, "num_pipelines: .* got 'many'"),
        ({"num_pipelines": "auto"}, 'max_steps: expected above 0 with num_pipelines="auto", .* got -1'),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps: expected at least 1, got 0"),
        ({"learning_rate": float("nan")}, "learning_rate: expected at least 0, got nan"),
        ({"adam_beta2": 1.0}, "adam_beta2: expected from 0 to below 1, got 1.0"),
        ({"num_train_epochs": 0}, "num_train_epochs: expected above 0, got 0"),
        ({"lr_scheduler_type": "cosin"}, "lr_scheduler_type: expected one of linear, .* got 'cosin'"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "lr_scheduler_type: .* got 'reduce_lr_on_plateau'"),
        ({"report_to": ["mlflow", "csv"]}, "report_to: expected some of tensorboard, wandb, csv, comet, got 'mlflow'"),
        ({"save_strategy": "best"}, 'save_strategy: expected "no", "steps" or "epoch", got \'best\''),
        ({"logging_steps": 0}, "logging_steps: expected an integer from 1, or a share .* got 0"),
        ({"save_steps": 2.5}, "save_steps: .* got 2.5"),
        ({"eval_steps": 10}, "eval_steps: expected eval_strategy=\"steps\" with it, got 'no'"),
        ({"warmup_steps": 5, "warmup_ratio": 0.1}, "warmup_ratio: expected this or warmup_steps, got 0.1 and 5"),
        ({"load_best_model_at_end": True}, "load_best_model_at_end: expected eval_strategy and save_strategy to be the same"),
        (
            {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 3, "save_steps": 10},
            "load_best_model_at_end: expected save_steps to be a multiple of eval_steps, got 10 and 3",
        ),
    ],
)
def test_problems(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        PipelineTrainingArguments(**options)


def test_all_problems_at_once() -> None:
    with pytest.raises(ValueError, match=r"2 problem\(s\) in the arguments:\n  weight_decay: .*\n  eval_steps: "):
        PipelineTrainingArguments(weight_decay=-1, eval_steps=5)


def test_what_follows_from_others() -> None:
    args = PipelineTrainingArguments(
        "~/out", load_best_model_at_end=True, eval_strategy="steps", logging_steps=100, num_pipelines="2", report_to="none"
    )
    assert (args.eval_steps, args.metric_for_best_model, args.greater_is_better) == (100, "loss", False)
    assert (args.num_pipelines, args.report_to, args.output_dir) == (2, [], str(Path.home() / "out"))
    assert PipelineTrainingArguments(metric_for_best_model="accuracy").greater_is_better is True


@pytest.mark.parametrize(
    ("options", "steps", "warmup"),
    [
        ({"num_train_epochs": 3}, 21, 0),
        ({"num_train_epochs": 0.5, "warmup_steps": 2}, 4, 2),
        ({"max_steps": 10, "num_train_epochs": 3, "warmup_ratio": 0.25}, 10, 3),
        ({"num_train_epochs": 3, "warmup_steps": 0.1}, 21, 3),
    ],
)
def test_length(options: dict[str, Any], steps: int, warmup: int) -> None:
    args = PipelineTrainingArguments(**options)
    assert args.num_steps(7) == steps and args.num_warmup_steps(steps) == warmup


def configured(deepspeed: Any = None, num_replicas: int = 2, **options: Any) -> dict[str, Any]:
    shape = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 4}
    return deepspeed_config(PipelineTrainingArguments(**(shape | options), deepspeed=deepspeed), num_replicas=num_replicas)


def test_configuration_without_a_file() -> None:
    config = configured(num_pipelines=2, partition=[0, 3, 7], weight_decay=0.1, report_to=["csv", "wandb"], output_dir="out")
    assert config == {
        "train_batch_size": 24,
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": False},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 5e-5, "weight_decay": 0.1, "betas": [0.9, 0.999], "eps": 1e-8, "torch_adam": True},
        },
        "csv_monitor": {"enabled": True, "output_path": "out", "job_name": "runs"},
        "wandb": {"enabled": True},
        "steps_per_print": None,
        "avgpipe": {"num_pipelines": 2, "partition": [0, 3, 7]},
    }
    assert AvgPipeConfig.from_deepspeed(configured()).num_pipelines == 1


def test_a_file_says_more(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    said = {
        "train_batch_size": "auto",
        "gradient_clipping": 1,
        "optimizer": {"type": "Adam", "params": {"lr": "auto", "betas": [0.9, 0.999], "torch_adam": False}},
        "zero_optimization": {"stage": 1},
        "avgpipe": {"num_pipelines": "auto", "averaging": {"alpha": "auto"}},
    }
    file.write_text(json.dumps(said))
    for source in (str(file), said):
        config = configured(source)
        assert config["train_batch_size"] == 24 and config["zero_optimization"] == {"stage": 1}
        assert config["optimizer"]["type"] == "Adam" and config["optimizer"]["params"]["torch_adam"] is False
        assert config["optimizer"]["params"]["lr"] == 5e-5
        assert config["avgpipe"] == said["avgpipe"]  # where "auto" is a value
    assert said["train_batch_size"] == "auto", "the user's own dictionary is left as it is"


def test_another_optimizer_gets_what_it_knows() -> None:
    params = configured({"optimizer": {"type": "Lion", "params": {"betas": [0.5, 0.9]}}}, learning_rate=1.0)["optimizer"][
        "params"
    ]
    assert params == {"lr": 1.0, "weight_decay": 0.0, "betas": [0.5, 0.9]}


@pytest.mark.parametrize(
    ("deepspeed", "problem"),
    [
        ({"train_batch_size": 32}, "train_batch_size: the arguments say 24, the configuration says 32"),
        ({"optimizer": {"params": {"lr": 0.1}}}, "optimizer.params.lr: the arguments say 5e-05, the configuration says 0.1"),
        ({"avgpipe": {"num_pipelines": "auto"}}, "avgpipe.num_pipelines: the arguments say 2, the configuration says 'auto'"),
        ({"bf16": {"enabled": True}}, "bf16.enabled: the arguments say False, the configuration says True"),
        ({"bf16": True}, "bf16: expected an object with 'enabled', got True"),
        ({"scheduler": {"type": "WarmupLR"}}, "scheduler: expected none, for lr_scheduler_type makes it"),
        ({"fp16": {"enabled": "auto"}}, 'fp16.enabled is "auto", but no argument says what it is'),
        ("missing.json", "deepspeed='missing.json' is no configuration"),
    ],
)
def test_conflicts(deepspeed: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        configured(deepspeed, num_pipelines=2)


def test_all_conflicts_at_once() -> None:
    with pytest.raises(ConfigError, match="(?s)train_batch_size: .*gradient_clipping: the arguments say 1.0, .* says 0.5"):
        configured({"train_batch_size": 32, "gradient_clipping": 0.5})
