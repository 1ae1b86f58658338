"""Saving and resuming a run, with a check that it is the same run."""

from pathlib import Path
from typing import Any

import torch.distributed

from avgpipe_ds.data import TrainingBatches
from avgpipe_ds.errors import DataError
from common.errors import RecipeError
from common.narrator import Narrator

__all__ = ["Checkpoints"]


class Checkpoints:
    """The checkpoints in one folder, with the position in the data."""

    def __init__(self, engine: Any, batches: TrainingBatches, narrator: Narrator, folder: str | None) -> None:
        """Without a folder, saving does nothing."""
        self._engine, self._batches, self._narrator, self._folder = engine, batches, narrator, folder

    def save(self) -> None:
        """Write a checkpoint. Every rank calls it."""
        if self._folder is not None:
            with self._narrator.phase(f"saving a checkpoint to {self._folder}"):
                position = self._batches.state_dict(self._engine.consumed_micro_batches)
                self._engine.save_checkpoint(self._folder, client_state={"data": position})

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
        try:
            self._batches.load_state_dict(client_state.get("data", {}))
        except DataError as error:
            raise RecipeError(f"--resume: the checkpoint in {self._folder} is of another run. {error}") from error

    @staticmethod
    def _any_rank_sees_one(folder: str) -> bool:
        """All ranks load or none: where only some see the folder, loading says which do not."""
        seen = [False] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(seen, (Path(folder) / "latest").is_file())
        return any(seen)
