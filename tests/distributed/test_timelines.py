"""Traces of real runs: complete, in order, and without a trace in the training itself."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from avgpipe_ds.report.load import load
from avgpipe_ds.report.shares import shares_of
from avgpipe_ds.tracing.chrome import message_key
from avgpipe_ds.tracing.spans import AVERAGING, OPTIMIZER_STEP, TRAIN_BATCH, WAIT, StageTrace
from tests.distributed.history import assert_same_history, train, whole
from tests.distributed.models import Run, Task
from tests.distributed.world import World

ITERATIONS, PIPELINES, MICRO_BATCHES = 4, 2, 3


def run_with(trace: Any, *, num_stages: int = 2, iterations: int = 6) -> Run:
    block = {"num_pipelines": PIPELINES, "trace": trace}
    return Run(
        task=Task(dropout=0.1),
        num_stages=num_stages,
        num_micro_batches=MICRO_BATCHES,
        iterations=iterations,
        clipping=0.5,
        avgpipe=block,
    )


def finished(trace: StageTrace, name: str) -> Counter[int]:
    return Counter(span.iteration for span in trace.spans if span.name == name)


def test_a_trace_is_complete_and_changes_nothing(worlds: dict[int, World], tmp_path: Path) -> None:
    traced = whole(worlds[2].run(train, run_with(str(tmp_path / "new" / "folder"))))
    assert_same_history(traced, whole(worlds[2].run(train, run_with(None))), tolerance=0)
    traces = load(tmp_path / "new" / "folder")
    assert [(t.stage_id, t.num_pipelines, t.num_micro_batches) for t in traces] == [(0, 2, 3), (1, 2, 3)]
    keys: list[set[Any]] = [set(), set()]
    for trace in traces:
        assert finished(trace, TRAIN_BATCH) == dict.fromkeys(range(2, 6), 1)
        assert finished(trace, OPTIMIZER_STEP) == dict.fromkeys(range(2, 6), PIPELINES)
        for name in ("ForwardPass", "BackwardPass"):
            computed = finished(trace, name)  # of iteration 2 some may have run ahead, before the recording
            assert all(computed[iteration] == PIPELINES * MICRO_BATCHES for iteration in (3, 4, 5))
        assert {s.pipeline_id for s in trace.spans if s.name == AVERAGING} == {0, 1}
        for span in trace.spans:
            message = message_key(trace, span)
            if message is not None and span.iteration in (3, 4, 5):
                keys[message[0]].add(message[1])
    assert keys[False] == keys[True] and len(keys[True]) >= 3 * 2 * PIPELINES * MICRO_BATCHES
    for one in shares_of(traces):
        assert sum(one.shares.values()) == pytest.approx(1) and one.shares["compute"] > 0 and one.shares["sending"] > 0


def test_a_pipeline_waits_or_works(worlds: dict[int, World], tmp_path: Path) -> None:
    """The spans of one pipeline do not overlap, but for the averaging inside the step."""
    worlds[2].run(train, run_with({"directory": str(tmp_path), "warmup": 0, "iterations": 2}, iterations=3))
    for trace in load(tmp_path):
        for pipeline_id in range(PIPELINES):
            spans = [s for s in trace.spans if s.pipeline_id == pipeline_id and s.name != AVERAGING]
            assert {s.detail for s in spans if s.name == WAIT} >= {
                "turn",
                "peers",
                "gradient" if trace.stage_id == 0 else "activation",
            }
            spans.sort(key=lambda span: (span.start_ns, span.end_ns))
            for earlier, later in zip(spans, spans[1:], strict=False):
                assert earlier.end_ns <= later.start_ns, f"{earlier} and {later}"


def test_what_there_is_is_written_when_training_ends_early(worlds: dict[int, World], tmp_path: Path) -> None:
    worlds[2].run(train, run_with(str(tmp_path), iterations=3))
    for trace in load(tmp_path):
        assert finished(trace, TRAIN_BATCH) == {2: 1}


def train_in_vain(run: Run) -> str:
    try:
        run.engine()
    except ValueError as error:
        return str(error)
    return "nothing was raised"


def test_a_folder_that_cannot_be_made(worlds: dict[int, World], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for said in worlds[2].run(train_in_vain, run_with(str(tmp_path / "file" / "folder"))):
        assert "avgpipe.trace: can't write to" in said and "name a folder that can be written to" in said


def spoil(run: Run, directory: str) -> list[float]:
    """The folder disappears while the run trains."""
    engine = run.engine()
    data = run.task.data()
    losses = [float(engine.train_batch(data)) for _ in range(2)]
    Path(directory).rename(directory + "-moved") if engine.stage_id == 0 else None
    losses += [float(engine.train_batch(data)) for _ in range(4)]
    engine.close()
    return losses


def test_a_trace_that_cannot_be_written_does_not_end_the_training(worlds: dict[int, World], tmp_path: Path) -> None:
    directory = tmp_path / "traces"
    first, last = worlds[2].run(spoil, run_with(str(directory)), str(directory))
    assert len(first) == 6 and first == last and not list(tmp_path.glob("*/rank-*.json"))


def test_one_stage(worlds: dict[int, World], tmp_path: Path) -> None:
    worlds[1].run(train, run_with(str(tmp_path), num_stages=1))
    (only,) = shares_of(load(tmp_path))
    assert only.shares["sending"] == only.shares["waiting for activations"] == only.shares["waiting for gradients"] == 0
