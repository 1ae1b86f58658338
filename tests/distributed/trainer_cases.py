"""What ranks do in the tests of the trainer, on a tiny BERT and sentences of a few words."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from transformers import EarlyStoppingCallback, TrainerCallback

from avgpipe_ds import data
from avgpipe_ds.trainer import PipelineTrainer, PipelineTrainingArguments

WORDS = ("good", "fine", "great", "bad", "poor", "awful", "the", "film", "plot", "was", "is", "very")
LABEL_NAMES = ("negative", "positive")
NUM_SAMPLES, NUM_HELD_OUT = 40, 10


def make_model(folder: Path, *, dropout: float = 0.1, num_labels: int | None = None) -> None:
    """A folder with a tiny BERT and its tokenizer; without `num_labels` its head is missing."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertForSequenceClassification, BertModel, PreTrainedTokenizerFast, set_seed

    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    vocabulary = {word: number for number, word in enumerate([*special.values(), *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")]
    )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=20,
        pad_token_id=0,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    set_seed(3)
    if num_labels is None:
        BertModel(config).save_pretrained(folder)
    else:
        config.num_labels = num_labels
        BertForSequenceClassification(config).save_pretrained(folder)


def make_csv(file: Path, num_rows: int = NUM_SAMPLES + NUM_HELD_OUT) -> None:
    """Sentences of 3 to 12 words, and whether they are kind."""
    draw = random.Random(5)
    rows = []
    for _ in range(num_rows):
        positive = draw.random() < 0.5
        words = [draw.choice(WORDS[6:]) for _ in range(draw.randint(2, 11))] + [
            draw.choice(WORDS[:3] if positive else WORDS[3:6])
        ]
        draw.shuffle(words)
        rows.append(f"{' '.join(words)},{LABEL_NAMES[positive]}")
    file.write_text("\n".join(["text,label", *rows]) + "\n")


def tokens(folder: Path, task: str = "sequence-classification") -> tuple[data.Tokenised, Any]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tables = data.load(folder / "reviews.csv")
    return data.tokenise(tables, tokenizer, task, progress=False).with_validation(0.2), tokenizer  # type: ignore[arg-type]


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def trainer(folder: Path, output: str, options: dict[str, Any], **more: Any) -> PipelineTrainer:
    samples, tokenizer = tokens(folder)
    defaults = {
        "num_pipelines": 2,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "learning_rate": 2e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    arguments = {
        "model": folder / "model",
        "task": "sequence-classification",
        "train_dataset": samples.train,
        "eval_dataset": samples.validation,
        "processing_class": tokenizer,
        "id2label": dict(enumerate(samples.label_names)),
        "compute_metrics": accuracy,
    }
    args = PipelineTrainingArguments(**({"output_dir": str(folder / output)} | defaults | options))
    return PipelineTrainer(args=args, **(arguments | more))


def outcome(made: PipelineTrainer) -> dict[str, Any]:
    """What a rank finds after training."""
    evaluated = made.evaluate()
    predicted = made.predict(made.eval_dataset)  # type: ignore[arg-type]
    return {
        "steps": made.state.global_step,
        "epoch": made.state.epoch,
        "logs": [line for line in made.state.log_history if "loss" in line],
        "evaluations": [line for line in made.state.log_history if "eval_loss" in line],
        "state": made.state,
        "evaluated": {name: value for name, value in evaluated.items() if "second" not in name and "runtime" not in name},
        "predictions": np.asarray(predicted.predictions),
        "labels": np.asarray(predicted.label_ids),
        "predicted": predicted.metrics,
        "num_pipelines": made.engine.num_pipelines,
    }


def train(folder: Path, output: str, options: dict[str, Any], resume: str | bool | None = None, **more: Any) -> dict[str, Any]:
    """Train to the end, evaluate, predict and save."""
    made = trainer(folder, output, options, **more)
    result = made.train(resume_from_checkpoint=resume)
    found = outcome(made) | {"training_loss": result.training_loss}
    made.save_model(folder / output / "model")
    made.engine.close()
    return found


class Scripted:
    """Metrics of a training that is at its best at the second evaluation."""

    def __init__(self) -> None:
        self.scores = iter([0.2, 0.6, 0.4, 0.5, 0.9])

    def __call__(self, prediction: Any) -> dict[str, float]:
        return {"score": next(self.scores)}


def stop_early(folder: Path, output: str) -> dict[str, Any]:
    """Evaluate and save at each step, until two evaluations were no better; keep one checkpoint beside the best."""
    options = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "save_total_limit": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "score",
    }
    stopping = EarlyStoppingCallback(early_stopping_patience=2)
    made = trainer(folder, output, options, compute_metrics=Scripted(), callbacks=[stopping])
    made.train()
    best = made.engine.reference_state_dict()
    names = {made.engine.module.checkpoint_name(name): tensor for name, tensor in best.items()}
    made.engine.close()
    return {"steps": made.state.global_step, "state": made.state, "weights": names}


def error_of(action: Callable[[], Any]) -> tuple[str, str]:
    """The class and the text of what it raises."""
    try:
        action()
    except Exception as error:  # noqa: BLE001
        return type(error).__name__, str(error)
    return "", "no error"


def bad_begins(folder: Path) -> dict[str, tuple[str, str]]:
    """Trainers that can't be made, one after another in the same processes."""
    import torch.distributed as dist

    samples, tokenizer = tokens(folder)
    others = {task: tokens(folder, task)[0].train for task in ("causal-lm", "masked-lm")}
    long = data.Sample(list(range(5)) * 5, 0, 1)
    third = data.Sample([2, 5, 3], 2, 1)
    begin = partial(trainer, folder, "bad")
    file = str(folder / "reviews.csv")
    cases: dict[str, Callable[[], Any]] = {
        "task": lambda: begin({}, train_dataset=others["causal-lm"]),
        "masked": lambda: begin({}, eval_dataset=others["masked-lm"]),
        "not tokenised": lambda: begin({}, train_dataset=samples.train.table),
        "empty": lambda: begin({}, train_dataset=[]),
        "too long": lambda: begin({}, train_dataset=[*samples.train, long]),
        "classes": lambda: begin({}, eval_dataset=[third]),
        "no eval_dataset": lambda: begin({"eval_strategy": "steps", "eval_steps": 2}, eval_dataset=None),
        "tokenizer": lambda: begin({}, processing_class=None),
        "stages": lambda: begin({"num_stages": 3}),
        "model": lambda: begin({}, model=folder / "nowhere"),
        "output_dir": lambda: begin({"output_dir": file}),
        "configuration": lambda: begin({"deepspeed": {"gradient_accumulation_steps": 8, "bf16": {"enabled": True}}}),
        "block": lambda: begin({"deepspeed": {"avgpipe": {"schedule": {"advances": 1}}}}),
        "one rank": lambda: begin({}, train_dataset=[] if dist.get_rank() == 1 else samples.train),
        "tokens": lambda: begin({}, task="token-classification"),
    }
    return {name: error_of(case) for name, case in cases.items()}


def bad_calls(folder: Path) -> dict[str, tuple[str, str]]:
    """Calls of a trainer that can't be; it works afterwards."""
    made = trainer(folder, "calls", {"max_steps": 2, "save_strategy": "steps", "save_steps": 2}, eval_dataset=None)
    other = tokens(folder, "causal-lm")[0].train
    half = folder / "calls" / "checkpoint-1"
    half.mkdir(parents=True, exist_ok=True)
    found = {
        "evaluate": error_of(made.evaluate),
        "evaluate other": error_of(lambda: made.evaluate(other)),
        # 18 tokens, which are not rounded up to 24: the model has 20 positions
        "nearly too long": error_of(lambda: made.evaluate([data.Sample([2] * 18, 0, 1)])),
        "incomplete": error_of(lambda: made.train(resume_from_checkpoint=str(half))),
    }
    made.train(resume_from_checkpoint=True)  # there is none: from the beginning
    found["steps"] = ("", str(made.state.global_step))
    found["again"] = error_of(made.train)
    made.engine.close()
    again = trainer(folder, "calls", {"max_steps": 4})
    found["among checkpoints"] = error_of(again.train)
    found["other data"] = error_of(lambda: trainer(folder, "calls", {"seed": 1}).train(resume_from_checkpoint=True))
    again.train(resume_from_checkpoint=True)
    found["resumed"] = ("", str(len([line for line in again.state.log_history if "loss" in line])))
    again.engine.close()
    return found


def train_sure(folder: Path, output: str, options: dict[str, Any]) -> dict[str, Any]:
    """Train the model that has a head and no dropout."""
    return train(folder, output, options, model=folder / "sure")


def train_twice(folder: Path, output: str, options: dict[str, Any], checkpoint: str) -> dict[str, Any]:
    """Train to the end, then go back to a checkpoint in the same trainer, and to the end again."""
    made = trainer(folder, output, options)
    made.train()
    made.train(resume_from_checkpoint=checkpoint)
    found = outcome(made)
    made.engine.close()
    return found


class Decides(TrainerCallback):  # type: ignore[misc]
    """Stops after the second step, but on one rank only."""

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        control.should_training_stop = state.global_step == 2 and state.is_world_process_zero


def stop_on_one_rank(folder: Path, output: str) -> tuple[str, str]:
    made = trainer(folder, output, {}, callbacks=[Decides])

    def go() -> None:
        made.train()
        made.save_model()

    found = error_of(go)
    made.engine.close()
    return found


def most_likely(logits: Any, labels: Any) -> Any:
    return logits.argmax(-1)


def train_language_model(folder: Path, output: str) -> dict[str, Any]:
    """A causal language model with random weights, whose outputs are as long as their micro-batch."""
    from transformers import GPT2Config

    samples, tokenizer = tokens(folder, "causal-lm")
    shapes: list[Any] = []

    def metrics(prediction: Any) -> dict[str, float]:
        shapes.append((prediction.predictions.shape, prediction.label_ids.shape))
        targets = prediction.label_ids[:, 1:]
        return {"accuracy": float((prediction.predictions[:, :-1] == targets)[targets != -100].mean())}

    made = trainer(
        folder,
        output,
        {"num_train_epochs": 6, "learning_rate": 1e-2, "per_device_eval_batch_size": 2},
        model=GPT2Config(vocab_size=len(tokenizer), n_embd=16, n_layer=2, n_head=2, n_positions=20, pad_token_id=0),
        task="causal-lm",
        id2label=None,
        train_dataset=samples.train,
        eval_dataset=samples.validation,
        compute_metrics=metrics,
        preprocess_logits_for_metrics=most_likely,
    )
    before = made.evaluate()
    made.train()
    after = made.evaluate()
    predicted = made.predict(samples.validation)  # type: ignore[arg-type]
    made.engine.close()
    longest = max(samples.validation.lengths)  # type: ignore[union-attr]
    return {"before": before, "after": after, "shapes": shapes, "shape": predicted.predictions.shape, "longest": longest}


def train_adapters(folder: Path, output: str) -> dict[str, Any]:
    from peft import LoraConfig

    lora = LoraConfig(r=2, lora_alpha=4, target_modules=["query", "value"], task_type="SEQ_CLS")
    return train(folder, output, {"weight_decay": 0.1}, model=folder / "sure", peft_config=lora)
