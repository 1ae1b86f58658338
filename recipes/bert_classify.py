"""Fine-tune a BERT to classify texts, with N elastic-averaged pipelines.

    deepspeed --num_accelerators 2 recipes/bert_classify.py --deepspeed_config ds_configs/bert_classify.json

The first line of `--help` to read is `--dataset`: a hub name, a local file, or one that an optional package carries.
"""

from pathlib import Path

from common.narrator import Narrator
from common.options import RecipeDefaults, parse_options
from common.session import run_recipe

DEFAULTS = RecipeDefaults(
    description="Fine-tune a BERT to classify texts, with N elastic-averaged pipelines.",
    model="minilm",
    dataset="bbc-news",
    deepspeed_config=str(Path(__file__).parent.parent / "ds_configs" / "bert_classify.json"),
    max_length=128,
    validation_fraction=0.2,
    max_validation_samples=None,
)


def main(narrator: Narrator) -> None:
    """Run the recipe; every rank runs it."""
    options, data = parse_options(DEFAULTS)
    with narrator.phase("importing torch, transformers and deepspeed"):
        from common.engine import build_engine, export
        from common.models import model_location
        from common.tasks import classification_task
        from common.training import report, train_and_validate

        import avgpipe_ds
        from avgpipe_ds import hf

    location = model_location(options.model)
    task, classes, tokenizer = classification_task(location, options, data, narrator)
    with narrator.phase("waiting for the other ranks"):
        avgpipe_ds.init_distributed()
    with narrator.phase(f"loading {options.model} into {options.stages} stages"):
        module = hf.to_pipeline(
            location,
            num_stages=options.stages,
            task="sequence-classification",
            id2label=dict(enumerate(classes)),
            pad_token_id=tokenizer.pad_token_id,
            activation_checkpoint_interval=options.activation_checkpoint_interval,
            seed=options.seed,
        )
    engine = build_engine(module, options, narrator)
    result = train_and_validate(engine, task, options, narrator)
    export(engine, tokenizer, options, narrator)
    report(narrator, {"recipe": "bert_classify", "model": options.model, "dataset": data.dataset, **result})


if __name__ == "__main__":
    run_recipe(main)
