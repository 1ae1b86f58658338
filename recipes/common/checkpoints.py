"""Saving and resuming a run, with a check that it is the same run."""

from pathlib import Path
from typing import Any

import torch.distributed

from common.errors import RecipeError
from common.narrator import Narrator
from common.sampler import BatchShape

__all__ = ["Checkpoints"]


class Checkpoints:
    """The checkpoints in one folder.

    The position in the data is not stored: it follows from the iterations that the engine has trained. It only does while
    the data, its division and the seed are the same, so these are stored and compared.
    """

    def __init__(
        self, engine: Any, narrator: Narrator, folder: str | None, *, shape: BatchShape, num_samples: int, seed: int
    ) -> None:
        """Remember what identifies the run; without a folder, saving does nothing."""
        self._engine = engine
        self._narrator = narrator
        self._folder = folder
        self._identity = {
            "samples": num_samples,
            "seed": seed,
            "pipelines": shape.num_pipelines,
            "data-parallel replicas": shape.num_replicas,
            "micro-batches": shape.num_micro_batches,
            "micro-batch size": shape.micro_batch_size,
        }

    def save(self) -> None:
        """Write a checkpoint. Every rank calls it."""
        if self._folder is not None:
            with self._narrator.phase(f"saving a checkpoint to {self._folder}"):
                self._engine.save_checkpoint(self._folder, client_state={"recipe": self._identity})

    def resume(self) -> None:
        """Load the newest checkpoint, if there is one. Every rank calls it.

        None is no error, so that a job which is requeued can run the same command as at first.

        Raises:
            RecipeError: the checkpoint is of a run whose data would be divided differently.

        """
        if self._folder is None or not self._any_rank_sees_one(self._folder):
            self._narrator.say(f"no checkpoint in {self._folder}: starting from the beginning")
            return
        with self._narrator.phase(f"resuming from {self._folder}"):
            path, client_state = self._engine.load_checkpoint(self._folder)
        if path is None:
            raise RecipeError(f"--resume: no checkpoint could be loaded from {self._folder}.")
        stored = client_state.get("recipe", {})
        different = [
            f"{name} {stored.get(name)} there, {value} here"
            for name, value in self._identity.items()
            if stored.get(name) != value
        ]
        if different:
            raise RecipeError(f"--resume: the checkpoint in {self._folder} is of another run: {'; '.join(different)}.")

    @staticmethod
    def _any_rank_sees_one(folder: str) -> bool:
        """All ranks load or none: where only some see the folder, loading says which do not."""
        seen = [False] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(seen, (Path(folder) / "latest").is_file())
        return any(seen)
