"""From a converted model to the engine, and back to a folder."""

from typing import TYPE_CHECKING, Any

from common.narrator import Narrator
from common.options import RecipeOptions

if TYPE_CHECKING:
    from avgpipe_ds.hf import HFPipelineModule

__all__ = ["build_engine", "export"]


def build_engine(module: "HFPipelineModule", options: RecipeOptions, narrator: Narrator) -> Any:
    """Make the N pipelines that the JSON file asks for. Every rank calls it."""
    from transformers import set_seed

    import avgpipe_ds

    set_seed(options.seed)  # dropout
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    with narrator.phase(f"building the pipelines of {options.deepspeed_config}"):
        engine, *_ = avgpipe_ds.initialize(model=module, model_parameters=trainable, config=options.deepspeed_config)
    return engine


def export(engine: Any, tokenizer: Any, options: RecipeOptions, narrator: Narrator) -> None:
    """Write the reference model and its tokenizer to `--output-dir`, if there is one. Every rank calls it."""
    from avgpipe_ds import hf

    if options.output_dir is None:
        return
    with narrator.phase(f"writing the reference model to {options.output_dir}"):
        hf.save_pretrained(engine, options.output_dir)
        if narrator.enabled:
            tokenizer.save_pretrained(options.output_dir)
