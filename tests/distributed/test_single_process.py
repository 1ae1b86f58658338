"""One pipeline, whatever its stages and its schedule, trains what a plain model trains on one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.history import assert_same_history, train, whole
from tests.distributed.models import Run, Task
from tests.distributed.oracle import train_on_one_process
from tests.distributed.world import World

SCHEDULES: list[dict[str, Any]] = [
    {"name": "1f1b"},
    {"name": "gpipe"},
    *({"name": "advance_forward", "advance": advance} for advance in range(5)),
]
CLIPPING = 0.05  # below every gradient norm of these models: each step is clipped


def check(worlds: dict[int, World], run: Run) -> None:
    ours = whole(worlds[run.num_stages].run(train, run))
    expected = train_on_one_process(run)
    assert not run.clipping or all(snapshot.norm is not None and snapshot.norm > run.clipping for snapshot in expected)
    assert_same_history(ours, expected)


def short(value: Any) -> str | None:
    return "-".join(str(v) for v in value.values()) if isinstance(value, dict) else None


@pytest.mark.parametrize("schedule", SCHEDULES, ids=short)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_every_schedule_with_clipping_over_all_stages(
    worlds: dict[int, World], num_stages: int, tied: bool, schedule: dict[str, Any]
) -> None:
    check(worlds, Run(task=Task(tied=tied), num_stages=num_stages, clipping=CLIPPING, avgpipe={"schedule": schedule}))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_without_clipping(worlds: dict[int, World], num_stages: int, tied: bool, optimizer: str) -> None:
    check(worlds, Run(task=Task(tied=tied), num_stages=num_stages, optimizer=optimizer))


@pytest.mark.parametrize("schedule", [SCHEDULES[0], SCHEDULES[1], SCHEDULES[3]], ids=short)
@pytest.mark.parametrize("num_stages, num_micro_batches", [(1, 1), (2, 1), (4, 1), (3, 2), (4, 3), (3, 7)])
def test_any_number_of_micro_batches(
    worlds: dict[int, World], num_stages: int, num_micro_batches: int, schedule: dict[str, Any]
) -> None:
    check(
        worlds,
        Run(
            task=Task(tied=True),
            num_stages=num_stages,
            num_micro_batches=num_micro_batches,
            clipping=CLIPPING,
            avgpipe={"schedule": schedule},
        ),
    )


@pytest.mark.parametrize("chosen_by, interval", [("module", 1), ("config", 2)])
@pytest.mark.parametrize("tied", [False, True], ids=["floats", "integer-inputs"])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_activation_checkpointing(worlds: dict[int, World], num_stages: int, tied: bool, chosen_by: str, interval: int) -> None:
    setting = {"activation_checkpoint_interval": interval}
    check(
        worlds,
        Run(
            task=Task(tied=tied),
            num_stages=num_stages,
            clipping=CLIPPING,
            config={"pipeline": setting} if chosen_by == "config" else {},
            module_options=setting if chosen_by == "module" else {},
        ),
    )


def test_reentrant_checkpointing_on_request(worlds: dict[int, World]) -> None:
    config = {"pipeline": {"activation_checkpoint_interval": 1, "use_reentrant": True}}
    check(worlds, Run(num_stages=2, clipping=CLIPPING, config=config))
