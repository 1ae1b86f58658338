"""The folders `checkpoint-<step>`: which are complete, which one is the newest, which are deleted.

A checkpoint is complete when it has the trainer's state, which is written last; what a job that was killed left behind has none.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from transformers import TrainerState

from avgpipe_ds.atomic import replacing

__all__ = ["STATE_FILE", "checkpoint_folder", "complete_checkpoints", "find_checkpoint", "rotate", "write_state"]

STATE_FILE = "trainer_state.json"

_NAME = re.compile(r"checkpoint-(\d+)")


def checkpoint_folder(output_dir: str, step: int) -> Path:
    """Where the checkpoint after this step is."""
    return Path(output_dir, f"checkpoint-{step}")


def complete_checkpoints(output_dir: str) -> list[Path]:
    """The complete checkpoints in a folder, by step."""
    named = [(_NAME.fullmatch(path.name), path) for path in Path(output_dir).glob("checkpoint-*")]
    complete = [(int(match[1]), path) for match, path in named if match and (path / STATE_FILE).is_file()]
    return [path for _, path in sorted(complete)]


def find_checkpoint(output_dir: str, wanted: str | bool | None) -> Path | None:
    """The checkpoint to continue from; None to begin anew.

    Args:
        output_dir: of the training.
        wanted: a folder; True for the newest in `output_dir`, if there is one; None or False for none.

    Raises:
        ValueError: the folder is no complete checkpoint, or the training would begin anew among the checkpoints of another one.

    """
    there = complete_checkpoints(output_dir)
    if wanted is True or (isinstance(wanted, str) and wanted.lower() == "true"):
        return there[-1] if there else None
    if wanted:
        folder = Path(wanted)
        if not (folder / STATE_FILE).is_file():
            known = ", ".join(map(str, there)) or "none"
            raise ValueError(
                f"resume_from_checkpoint: expected a folder with a complete checkpoint, got {str(folder)!r}, which has no"
                f" {STATE_FILE}. Complete ones in {output_dir!r}: {known}"
            )
        return folder
    if there:
        raise ValueError(
            f"expected no checkpoints in output_dir, for this training begins anew and would mix with them, found {there[-1]}:"
            " pass resume_from_checkpoint=True to continue, or choose another folder"
        )
    return None


def write_state(state: TrainerState, folder: Path) -> None:
    """Write `trainer_state.json`, as a whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / STATE_FILE) as part:
        state.save_to_json(str(part))


def rotate(output_dir: str, *, newest: Path, best: str | None, limit: int | None) -> None:
    """Delete the oldest complete checkpoints, until no more than `limit` are left; never the newest, nor the best.

    Args:
        output_dir: with the checkpoints.
        newest: that was just written; those of later steps are left alone.
        best: is kept, too; None if there is none.
        limit: how many to keep; None for all.

    """
    if limit is None:
        return
    until_now = complete_checkpoints(output_dir)
    until_now = until_now[: until_now.index(newest) + 1]
    kept = {newest, *([Path(best)] if best else [])}
    spare = [path for path in until_now if path not in kept]
    for path in spare[: max(0, len(until_now) - max(limit, len(kept)))]:
        (path / STATE_FILE).unlink()  # first: what is left of a deletion that is interrupted is not complete
        shutil.rmtree(path)
