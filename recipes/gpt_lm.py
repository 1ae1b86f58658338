"""Fine-tune a GPT-2 or Llama as a language model, with N elastic-averaged pipelines.

deepspeed --num_accelerators 2 recipes/gpt_lm.py --deepspeed_config ds_configs/gpt_lm.json --steps 40
"""

from pathlib import Path

from common.narrator import Narrator
from common.options import RecipeDefaults, parse_options
from common.session import run_recipe

DEFAULTS = RecipeDefaults(
    description="Fine-tune a GPT-2 or Llama as a language model, with N elastic-averaged pipelines.",
    model="smollm2-135m",
    dataset="python-stdlib",
    deepspeed_config=str(Path(__file__).parent.parent / "ds_configs" / "gpt_lm.json"),
    max_length=128,
    validation_fraction=0.05,
    max_validation_samples=64,
    labelled=False,
)


def main(narrator: Narrator) -> None:
    """Run the recipe; every rank runs it."""
    options, data = parse_options(DEFAULTS)
    with narrator.phase("importing torch, transformers and deepspeed"):
        from common.engine import build_engine, export
        from common.models import model_location
        from common.tasks import language_task
        from common.training import report, train_and_validate

        import avgpipe_ds
        from avgpipe_ds import hf

    with narrator.phase(f"looking for {options.model} (a packaged model may have to be converted once, which takes a minute)"):
        location = model_location(options.model)
    task, tokenizer = language_task(location, options, data, narrator)
    with narrator.phase("waiting for the other ranks"):
        avgpipe_ds.init_distributed()
    with narrator.phase(f"loading {options.model} into {options.stages} stages"):
        module = hf.to_pipeline(
            location,
            num_stages=options.stages,
            task="causal-lm",
            activation_checkpoint_interval=options.activation_checkpoint_interval,
            seed=options.seed,
        )
    engine = build_engine(module, options, narrator)
    result = train_and_validate(engine, task, options, narrator)
    export(engine, tokenizer, options, narrator)
    report(narrator, {"recipe": "gpt_lm", "model": options.model, "dataset": data.dataset, **result})


if __name__ == "__main__":
    run_recipe(main)
