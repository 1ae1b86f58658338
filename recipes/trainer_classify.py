"""Fine-tune a model to classify texts: a script for `transformers.Trainer`, with a few lines changed (docs/trainer.md).

deepspeed --num_accelerators 2 recipes/trainer_classify.py --model bert-base-uncased --dataset reviews.csv --num_pipelines 2
"""

from dataclasses import dataclass

from transformers import AutoTokenizer, EvalPrediction, HfArgumentParser

from avgpipe_ds import data
from avgpipe_ds.trainer import PipelineTrainer, PipelineTrainingArguments


@dataclass
class ScriptArguments:
    """What is trained, and on what: a hub name or a folder; a hub name, a file or a folder."""

    model: str
    dataset: str


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """How often the most likely class is right."""
    return {"accuracy": (prediction.predictions.argmax(-1) == prediction.label_ids).mean()}


def main() -> None:
    """Train, evaluate and save; every rank runs it."""
    script, args = HfArgumentParser((ScriptArguments, PipelineTrainingArguments)).parse_args_into_dataclasses()
    tokenizer = AutoTokenizer.from_pretrained(script.model)
    tokens = data.tokenise(data.load(script.dataset), tokenizer, "sequence-classification", max_length=128, truncate=True)
    tokens = tokens.with_validation(0.1)
    trainer = PipelineTrainer(
        model=script.model,
        args=args,
        task="sequence-classification",
        id2label=dict(enumerate(tokens.label_names)),
        train_dataset=tokens.train,
        eval_dataset=tokens.validation,
        processing_class=tokenizer,
        compute_metrics=accuracy,
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
