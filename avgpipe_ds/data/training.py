"""The micro-batches that one replica trains on, epoch after epoch, from any position."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from avgpipe_ds.data.collate import Collate, MicroBatch
from avgpipe_ds.data.sampler import BatchShape, epoch_order, order_by_length, plan_iteration, position_of
from avgpipe_ds.data.samples import DrawnAnew, Sample, lengths_of, num_targets_of
from avgpipe_ds.errors import DataError

__all__ = ["TrainingBatches"]


class TrainingBatches(Iterator[MicroBatch]):
    """An iterator for `engine.train_batch`, the same on every rank of a pipeline.

    The engine takes data ahead, so what was taken is more than what was trained, and only the engine knows the latter:

        engine.save_checkpoint(folder, client_state={"data": batches.state_dict(engine.consumed_micro_batches)})

        _, client_state = engine.load_checkpoint(folder)
        batches.load_state_dict(client_state["data"])

    The iterator ends with the last iteration, so the engine starts no work that would be thrown away.

    Args:
        samples: the same on every rank.
        collate: makes tensors of them.
        shape: how the engine divides an iteration.
        replica: which data-parallel replica this rank belongs to.
        seed: of the order of samples, and of what is masked.
        epochs: how often every sample is trained on; or
        iterations: how many iterations are trained.
        group_by_length: whether the samples of a micro-batch are of like length, so that little is computed for padding.

    Raises:
        DataError: there is no sample, or one without a target.
        ValueError: there is no such replica; or not one of `epochs` and `iterations` is given.

    """

    def __init__(
        self,
        samples: Sequence[Sample],
        collate: Collate,
        shape: BatchShape,
        *,
        replica: int = 0,
        seed: int = 0,
        epochs: int | None = None,
        iterations: int | None = None,
        group_by_length: bool = False,
    ) -> None:
        if not len(samples):
            raise DataError("There is no sample to train on.")
        if not 0 <= replica < shape.num_replicas:
            raise ValueError(f"replica must lie in 0 .. {shape.num_replicas - 1}, got {replica}")
        if (epochs is None) == (iterations is None):
            raise ValueError(f"pass either epochs or iterations, got epochs={epochs} and iterations={iterations}")
        self._samples, self._collate, self._shape, self._replica, self._seed = samples, collate, shape, replica, seed
        self._num_targets = num_targets_of(samples)
        self._lengths = lengths_of(samples) if group_by_length else None
        self._epochs, self._iterations = epochs, iterations
        self._taken = 0
        self._stream = self._from(0)

    @property
    def iterations_per_epoch(self) -> int:
        """Iterations that train every sample once."""
        return self._shape.iterations_per_epoch(len(self._samples))

    @property
    def num_iterations(self) -> int:
        """Iterations of the whole training."""
        return self._iterations if self._iterations is not None else (self._epochs or 0) * self.iterations_per_epoch

    def __next__(self) -> MicroBatch:
        micro_batch = next(self._stream)
        self._taken += 1
        return micro_batch

    def state_dict(self, trained_micro_batches: int) -> dict[str, Any]:
        """What continues behind the micro-batches that were trained: the position, and what it means a position in.

        Args:
            trained_micro_batches: of these data: `engine.consumed_micro_batches`, less what the engine had trained on others.

        Raises:
            ValueError: more than were taken.

        """
        if not 0 <= trained_micro_batches <= self._taken:
            raise ValueError(
                f"{trained_micro_batches} micro-batches are said to be trained, but {self._taken} were taken: pass"
                " engine.consumed_micro_batches, less those of other data"
            )
        iteration, micro_batch = divmod(trained_micro_batches, self._shape.micro_batches_per_iteration)
        epoch, iteration = position_of(iteration, len(self._samples), self._shape)
        return {"epoch": epoch, "iteration": iteration, "micro_batch": micro_batch, **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from there; what was taken and not trained comes again.

        Raises:
            DataError: these are other data, or they are divided differently.

        """
        different = [
            f"{name.replace('_', ' ')} {state.get(name)} there, {value} here"
            for name, value in self._identity().items()
            if state.get(name) != value
        ]
        if different:
            raise DataError(f"The data, or how they are divided, differ from those of the position: {'; '.join(different)}.")
        iteration = state["epoch"] * self.iterations_per_epoch + state["iteration"]
        self._taken = iteration * self._shape.micro_batches_per_iteration + state["micro_batch"]
        self._stream = self._from(self._taken)

    def _identity(self) -> dict[str, Any]:
        return {
            "samples": len(self._samples),
            "seed": self._seed,
            "group_by_length": self._lengths is not None,
            **asdict(self._shape),
        }

    def _from(self, micro_batch: int) -> Iterator[MicroBatch]:
        """The micro-batches from the given one on."""
        first, skipped = divmod(micro_batch, self._shape.micro_batches_per_iteration)
        order: Sequence[int] = ()
        samples = self._samples
        order_epoch = -1
        for run_iteration in range(first, self.num_iterations):
            epoch, iteration = position_of(run_iteration, len(self._samples), self._shape)
            if epoch != order_epoch:
                order, order_epoch = self._order(epoch), epoch
                samples = (
                    self._samples.in_epoch(epoch, seed=self._seed) if isinstance(self._samples, DrawnAnew) else self._samples
                )
            plan = plan_iteration(order, self._num_targets, self._shape, iteration)
            micro_batches = [slots for pipeline in plan for slots in pipeline[self._replica]]
            for slots in micro_batches[skipped if run_iteration == first else 0 :]:
                yield self._collate([samples[slot.sample] for slot in slots], [slot.weight for slot in slots])

    def _order(self, epoch: int) -> Sequence[int]:
        if self._lengths is None:
            return epoch_order(len(self._samples), seed=self._seed, epoch=epoch)
        return order_by_length(self._lengths, self._shape.micro_batch_size, seed=self._seed, epoch=epoch)
