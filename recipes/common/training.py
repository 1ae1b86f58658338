"""The part of a run that both recipes share: from a built engine to the final line."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from avgpipe_ds.data import BatchShape, Collate, Sample, TrainingBatches
from common.checkpoints import Checkpoints
from common.evaluation import Validation, validate
from common.narrator import Narrator
from common.options import RecipeOptions
from common.progress import TrainingProgress

__all__ = ["TaskData", "train_and_validate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskData:
    """Tokenised samples, and how tensors are made of them."""

    train: Sequence[Sample]
    validation: Sequence[Sample]
    collate: Collate

    @property
    def classes(self) -> bool:
        """Whether samples have a class, so that there is an accuracy; otherwise there is a perplexity."""
        return isinstance(self.train[0].labels, int)


def train_and_validate(engine: Any, data: TaskData, options: RecipeOptions, narrator: Narrator) -> dict[str, Any]:
    """Train as long as the options say, validate, save checkpoints, and return what the final line reports.

    Every rank calls it.
    """
    shape = BatchShape.of(engine)
    num_samples = len(data.train)
    per_epoch = shape.iterations_per_epoch(num_samples)
    batches = TrainingBatches(
        data.train,
        data.collate,
        shape,
        replica=engine.grid.get_data_parallel_rank(),
        seed=options.seed,
        iterations=options.steps or options.epochs * per_epoch,
    )
    num_iterations = batches.num_iterations
    checkpoints = Checkpoints(engine, batches, narrator, options.save_dir)
    if options.resume:
        checkpoints.resume()
    first = engine.consumed_micro_batches // shape.micro_batches_per_iteration
    narrator.say(
        f"training iterations {first + 1} to {num_iterations} ({per_epoch} an epoch): {shape.num_pipelines} pipelines x"
        f" {shape.num_replicas} replicas x {shape.num_micro_batches} micro-batches x {shape.micro_batch_size} samples"
    )
    progress = TrainingProgress(narrator, first_iteration=first, num_iterations=num_iterations)
    loss: float | None = None  # stays so if a run that had ended is resumed
    validation: Validation | None = None

    def validate_now() -> None:
        nonlocal validation
        validation = _validate(engine, data, options, narrator)

    for done in range(first + 1, num_iterations + 1):
        narrator.working_on("training the first iteration" if done == first + 1 else f"training iteration {done}")
        loss = float(engine.train_batch(batches))
        progress.advance(loss=loss, samples=_samples_of(done - 1, num_samples, shape))
        if done < num_iterations:  # what is due at the end is done once, below
            if options.eval_every and done % options.eval_every == 0:
                progress.paused(validate_now)
            if options.save_every and done % options.save_every == 0:
                progress.paused(checkpoints.save)
    trained_s, samples_per_s = progress.trained_s, progress.samples_per_s
    progress.close()
    narrator.working_on(None)
    checkpoints.save()
    validate_now()
    assert validation is not None
    return {
        "pipelines": shape.num_pipelines,
        "stages": options.stages,
        "iterations": num_iterations,
        "epochs": round(num_iterations / per_epoch, 3),
        "training_s": round(trained_s, 2),
        "samples_per_s": round(samples_per_s, 2),
        "training_loss": loss,
        **validation.summary(classes=data.classes),
    }


def report(narrator: Narrator, result: dict[str, Any]) -> None:
    """Print the line that scripts read, the last one of a run."""
    narrator.write("RESULT " + json.dumps(result))


def _validate(engine: Any, data: TaskData, options: RecipeOptions, narrator: Narrator) -> Validation:
    with narrator.phase(f"validating the reference model on {len(data.validation)} samples"):
        validation = validate(engine, data.validation, data.collate, micro_batch_size=options.eval_micro_batch_size)
    quality = (
        f"accuracy {validation.accuracy:.4f}" if validation.accuracy is not None else f"perplexity {validation.perplexity:.3f}"
    )
    narrator.say(f"validation: {quality}, loss {validation.loss:.4f}")
    return validation


def _samples_of(run_iteration: int, num_samples: int, shape: BatchShape) -> int:
    """Count the real samples of an iteration: fewer in the last one of an epoch."""
    start = run_iteration % shape.iterations_per_epoch(num_samples) * shape.samples_per_iteration
    return min(shape.samples_per_iteration, num_samples - start)
