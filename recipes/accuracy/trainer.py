"""One training, whoever does it: validations as samples go by, until the budget is used up or the target is passed."""

import math
from collections.abc import Callable, Iterator
from typing import Protocol

from common.evaluation import Validation

from accuracy.curves import passed_clearly
from accuracy.records import Conditions, Point
from avgpipe_ds.data import BatchShape, MicroBatch

__all__ = ["Trainer", "iterations_to_validate", "samples_after", "train", "warm_up"]


class Trainer(Protocol):
    """What can train an iteration, and validate the model that would be used."""

    shape: BatchShape

    def train_iteration(self, batches: Iterator[MicroBatch]) -> float:
        """Train one iteration and return the mean loss of its samples, NaN on every rank where training has diverged."""

    def validate(self) -> Validation:
        """Validate the model that would be used."""

    def close(self) -> None:
        """Release what is not mere memory."""


def train(
    trainer: Trainer,
    batches: Iterator[MicroBatch],
    conditions: Conditions,
    *,
    num_samples: int,
    target: float | None,
    say: Callable[[Point], None],
) -> tuple[list[Point], bool]:
    """Train and return the curve, and whether training diverged; every rank calls it.

    Args:
        trainer: does the work.
        batches: yields the micro-batches of all iterations.
        conditions: the budget, and how often to validate.
        num_samples: samples of the data set.
        target: the accuracy at which to stop, once it has been passed clearly; None to use up the budget.
        say: told every point at once.

    """
    curve: list[Point] = []
    done = 0
    for stop in iterations_to_validate(conditions, trainer.shape):
        losses: list[float] = []
        for _ in range(done, stop):
            losses.append(trainer.train_iteration(batches))
            if not math.isfinite(losses[-1]):
                return curve, True
        done = stop
        found = trainer.validate()
        assert found.accuracy is not None  # only classification comes here
        if not math.isfinite(found.loss):
            return curve, True
        curve.append(
            Point(
                samples=samples_after(done, num_samples, trainer.shape),
                accuracy=found.accuracy,
                loss=found.loss,
                training_loss=sum(losses) / len(losses),
            )
        )
        say(curve[-1])
        if target is not None and passed_clearly(curve, target):
            break
    return curve, False


def iterations_to_validate(conditions: Conditions, shape: BatchShape) -> list[int]:
    """Return after which iterations to validate: those nearest to each multiple of `eval_every` samples."""
    per_iteration = shape.samples_per_iteration
    wanted = range(conditions.eval_every, conditions.max_samples + 1, conditions.eval_every)
    return sorted({max(1, round(samples / per_iteration)) for samples in wanted})


def samples_after(iterations: int, num_samples: int, shape: BatchShape) -> int:
    """Count the samples that `iterations` iterations train: the last iteration of an epoch has fewer."""
    epochs, rest = divmod(iterations, shape.iterations_per_epoch(num_samples))
    return epochs * num_samples + rest * shape.samples_per_iteration


def warm_up(conditions: Conditions, shape: BatchShape) -> Callable[[int], float]:
    """Return the factor of the learning rate by iteration, from 0: up to 1 within `warmup_samples`, then constant.

    Counted in samples, so that a contender with larger iterations does not warm up for longer.
    """

    def factor(iteration: int) -> float:
        samples = (iteration + 1) * shape.samples_per_iteration
        return min(1.0, samples / conditions.warmup_samples) if conditions.warmup_samples else 1.0

    return factor
