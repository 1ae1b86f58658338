"""`"advance": "auto"` in real training: decided together, followed by all stages, and without a trace in the weights."""

from __future__ import annotations

from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import pytest

from tests.distributed.history import assert_same_history, train, whole
from tests.distributed.models import Run, Task
from tests.distributed.world import CaseFailed, World

MICRO_BATCHES = 6


def run_with(advance: Any, *, iterations: int, num_stages: int = 2, **block: Any) -> Run:
    schedule = {"name": "advance_forward", "advance": advance}
    return Run(
        task=Task(dropout=0.1),
        num_stages=num_stages,
        num_micro_batches=MICRO_BATCHES,
        iterations=iterations,
        clipping=0.5,
        avgpipe={"num_pipelines": 2, "schedule": schedule, **block},
    )


def follow(run: Run, best: int, folder: str | None = None, saved_after: int = 0) -> dict[str, Any]:
    """Train with times as if each advance up to `best` saved something; rank and advance decide them, so that ranks differ.

    Returns:
        The slots of the schedule that each iteration really had, the final advance, and weights at the end.

    """
    engine = run.engine()
    decide, slots = engine.advance.trained, []

    def trained(iteration: int, seconds: float) -> None:
        assert seconds > 0
        advance = engine.pipelines[0].schedule(iteration).num_pipe_buffers()
        slots.append(advance)
        first_stage = engine.stage_id == 0
        decide(iteration, 1.0 - 0.1 * min(advance - 2, best) if first_stage else 1.1)

    engine.advance.trained = trained
    data = run.task.data()
    printed = StringIO()
    for iteration in range(run.iterations):
        with redirect_stdout(printed):
            engine.train_batch(data)
        if folder is not None and iteration + 1 == saved_after:
            engine.save_checkpoint(folder)
    found = {"slots": slots, "advance": engine.advance.advance, "settled": engine.advance.settled}
    decisions = [f"{one.reason}{': it stays' if one.settled else ''}" for one in engine.advance.decisions]
    assert decisions and [line for line in printed.getvalue().splitlines() if line in decisions] == (
        decisions if engine.stage_id == 0 else []
    )
    engine.close()
    return found


def resumed(run: Run, folder: str) -> tuple[int, bool, int]:
    engine = run.engine()
    engine.load_checkpoint(folder)
    data = run.task.data()
    engine.train_batch(data)
    found = (engine.advance.advance, engine.advance.settled, engine.pipelines[0].schedule(engine.iteration).num_pipe_buffers())
    engine.close()
    return found


def test_all_stages_follow_the_search(worlds: dict[int, World], tmp_path: Any) -> None:
    """Two steps up, one that does not pay; the first stage stores 2 + a micro-batches, the last one always 1."""
    run = run_with("auto", iterations=120)
    first, last = worlds[2].run(follow, run, 2, str(tmp_path), 120)
    assert (first["advance"], first["settled"]) == (last["advance"], last["settled"]) == (2, True)
    assert set(last["slots"]) == {1}
    assert first["slots"][:2] == [2, 2] and first["slots"][-1] == 4
    assert max(first["slots"]) == 5, "the step that does not pay was never tried"
    assert worlds[2].run(resumed, run, str(tmp_path)) == [(2, True, 4), (2, True, 1)]


def test_the_weights_are_those_of_any_advance(worlds: dict[int, World]) -> None:
    """The search changes the order of computation only; it is under way for all of these iterations."""
    found = whole(worlds[2].run(train, run_with("auto", iterations=20)))
    assert_same_history(found, whole(worlds[2].run(train, run_with(0, iterations=20))), tolerance=0)


def test_memory_ends_the_search(worlds: dict[int, World]) -> None:
    """Weights and all of a stage take some 20 kB; a micro-batch about 1 kB."""
    found = worlds[2].run(limits, run_with("auto", iterations=3))
    needs = found[0]
    limit_gb = (needs[4] + needs[6]) / 2 / 1e9  # between two and three stored micro-batches of each pipeline
    first, last = worlds[2].run(follow, run_with("auto", iterations=30, memory_limit_gb=limit_gb), 3)
    assert (first["advance"], first["settled"]) == (last["advance"], last["settled"]) == (0, True)
    assert set(first["slots"]) == {2}


def limits(run: Run) -> dict[int, int]:
    engine = run.engine()
    data = run.task.data()
    for _ in range(run.iterations):
        engine.train_batch(data)
    found = {stored: engine._ensemble.memory_with(stored).total for stored in (4, 6)}
    engine.close()
    return found


def test_a_limit_that_nothing_fits_is_an_error_on_every_rank(worlds: dict[int, World]) -> None:
    with pytest.raises(CaseFailed) as caught:
        worlds[2].run(follow, run_with("auto", iterations=30, memory_limit_gb=1e-6), 3)
    assert sorted(caught.value.errors) == [0, 1]
    for text in caught.value.errors.values():
        assert "AvgPipeError: advance 0 needs" in text and "avgpipe.memory_limit_gb is 1e-06: raise the limit" in text


def test_one_stage_has_nothing_to_search(worlds: dict[int, World]) -> None:
    (only,) = worlds[1].run(follow, run_with("auto", iterations=8, num_stages=1), 3)
    assert (only["advance"], only["settled"]) == (0, True)
