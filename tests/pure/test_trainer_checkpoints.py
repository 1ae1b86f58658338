"""Which checkpoints there are, which one is continued, which are deleted; and what is logged between them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from transformers import DefaultFlowCallback, EarlyStoppingCallback, TrainerState
from transformers.trainer_callback import CallbackHandler

from avgpipe_ds.trainer.callbacks import callback_states, load_callback_states
from avgpipe_ds.trainer.checkpoints import STATE_FILE, complete_checkpoints, find_checkpoint, rotate, write_state
from avgpipe_ds.trainer.evaluation import rectangular
from avgpipe_ds.trainer.log import TrainingLog


def write(folder: Path, *steps: int) -> list[Path]:
    for step in steps:
        write_state(TrainerState(global_step=step), folder / f"checkpoint-{step}")
        (folder / f"checkpoint-{step}" / "weights").touch()
    return [folder / f"checkpoint-{step}" for step in steps]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_complete_ones_by_step(tmp_path: Path) -> None:
    written = write(tmp_path, 9, 100, 20)
    (tmp_path / "checkpoint-200").mkdir()  # of a job that was killed
    write_state(TrainerState(), tmp_path / "checkpoint-final")
    assert complete_checkpoints(str(tmp_path)) == [written[0], written[2], written[1]]
    assert complete_checkpoints(str(tmp_path / "nowhere")) == []
    assert TrainerState.load_from_json(str(written[0] / STATE_FILE)).global_step == 9


def test_which_one_is_continued(tmp_path: Path) -> None:
    assert find_checkpoint(str(tmp_path), None) is None
    assert find_checkpoint(str(tmp_path), True) is None
    first, last = write(tmp_path, 5, 10)
    (tmp_path / "checkpoint-15").mkdir()
    assert find_checkpoint(str(tmp_path), True) == find_checkpoint(str(tmp_path), "True") == last
    assert find_checkpoint(str(tmp_path), str(first)) == first
    with pytest.raises(
        ValueError, match="expected a folder with a complete checkpoint, got .*checkpoint-15.*checkpoint-5, .*-10"
    ):
        find_checkpoint(str(tmp_path), str(tmp_path / "checkpoint-15"))
    for none in (None, False):
        with pytest.raises(ValueError, match="begins anew and would mix with them, found .*checkpoint-10"):
            find_checkpoint(str(tmp_path), none)


@pytest.mark.parametrize(
    ("limit", "newest", "best", "left"),
    [
        (None, 40, None, [10, 20, 30, 40]),
        (2, 40, None, [30, 40]),
        (1, 40, None, [40]),
        (2, 40, 10, [10, 40]),
        (1, 40, 10, [10, 40]),
        (3, 40, 10, [10, 30, 40]),
        (1, 20, None, [20, 30, 40]),  # resumed from 10: those of later steps were not written by this run
    ],
)
def test_rotation(tmp_path: Path, limit: int | None, newest: int, best: int | None, left: list[int]) -> None:
    write(tmp_path, 10, 20, 30, 40)
    best_folder = None if best is None else str(tmp_path / f"checkpoint-{best}")
    rotate(str(tmp_path), newest=tmp_path / f"checkpoint-{newest}", best=best_folder, limit=limit)
    assert names(tmp_path) == [f"checkpoint-{step}" for step in left]


def test_what_is_left_of_an_interrupted_deletion_is_not_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = write(tmp_path, 1, 2)

    def interrupted(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shutil.rmtree", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rotate(str(tmp_path), newest=new, best=None, limit=1)
    assert old.is_dir() and complete_checkpoints(str(tmp_path)) == [new]


def test_means_since_the_last_line_survive_a_checkpoint() -> None:
    log, resumed = TrainingLog(), TrainingLog()
    log.add(3.0)
    line = log.line(learning_rate=0.1, grad_norm=None, epoch=0.25, num_samples=8)
    assert line == {"loss": 3.0, "learning_rate": 0.1}
    log.add(1.0)
    resumed.load_state_dict(log.state_dict())
    with resumed.training():
        resumed.add(4.0)
    resumed.seconds = 0.5
    line = resumed.line(learning_rate=0.1, grad_norm=2, epoch=0.75, num_samples=8)
    assert line == {"loss": 2.5, "learning_rate": 0.1, "grad_norm": 2.0, "samples_per_second": 8.0}
    assert resumed.total_loss == 8.0 and resumed.steps == 0


def test_callbacks_go_on_where_they_were() -> None:
    def handler() -> CallbackHandler:
        return CallbackHandler([DefaultFlowCallback(), EarlyStoppingCallback(early_stopping_patience=3)], None, None, None, None)

    before, after = handler(), handler()
    before.callbacks[1].early_stopping_patience_counter = 2
    states = callback_states(before)
    states["EarlyStoppingCallback"]["args"]["early_stopping_patience"] = 9  # arguments are those of now
    load_callback_states(after, json.loads(json.dumps(states)))
    assert after.callbacks[1].early_stopping_patience_counter == 2 and after.callbacks[1].early_stopping_patience == 3


def test_arrays_of_one_shape() -> None:
    rows = [np.ones((2, 3), dtype=np.float32), np.ones((1, 3), dtype=np.float32)]
    filled, labels = rectangular((rows, [np.array([1, 2]), np.array([3])]))
    assert filled.shape == (2, 2, 3) and filled.dtype == np.float32 and (filled[1, 1] == -100).all() and (filled[0] == 1).all()
    assert labels.tolist() == [[1, 2], [3, -100]]
    whole = np.zeros((4, 2))
    assert rectangular(whole) is whole
