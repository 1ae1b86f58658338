"""However a script ends, every rank ends, soon, and says why. Whole processes, from the start to the exit code."""

from __future__ import annotations

import gc
import signal
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from tests.distributed.forks import HUNG, Ended, Forks
from tests.distributed.models import Run
from tests.distributed.world import World

SCRIPTS = "tests.distributed.scripts.exits"


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    origin = Forks()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TEST_DIRECTORY", str(tmp_path_factory.mktemp("checkpoints")))
        yield origin
        origin.stop()


def run(forks: Forks, size: int, case: str, *args: Any) -> list[Ended]:
    """The ends of a case; whatever it is, no rank hangs and none is aborted by the C++ runtime."""
    ends = forks.run(size, f"{SCRIPTS}:{case}", *args)
    for end in ends:
        assert end.code != HUNG, end.output
        assert end.code != -signal.SIGABRT and "terminate called" not in end.output, end.output
    return ends


def last_line(end: Ended) -> str:
    return end.output.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("size", "num_pipelines", "num_stages", "in_flight"),
    [(2, 2, 2, True), (3, 2, 3, True), (2, 2, 2, False), (2, 1, 2, True), (2, 2, 1, True)],
)
def test_a_script_just_ends(forks: Forks, size: int, num_pipelines: int, num_stages: int, in_flight: bool) -> None:
    for end in run(forks, size, "just_ends", num_pipelines, num_stages, 2, in_flight):
        assert end.code == 0, end.output
        assert "Traceback" not in end.output


@pytest.mark.parametrize(
    ("size", "early", "how", "code", "reason"),
    [
        (2, 0, "return", 0, "it ended"),
        (2, 1, "exit", 3, "it ended"),
        (2, 0, "interrupt", -signal.SIGINT, "it ended with KeyboardInterrupt"),
        (3, 1, "raise", 1, "it ended with OSError: disk full"),
        (3, 1, "kill", -signal.SIGKILL, ""),
        (2, 1, "kill", -signal.SIGKILL, ""),
    ],
)
def test_a_rank_leaves_while_the_others_train(forks: Forks, size: int, early: int, how: str, code: int, reason: str) -> None:
    ends = run(forks, size, "one_ends_early", early, how)
    assert ends[early].code == code, ends[early].output
    for rank, end in enumerate(ends):
        if rank != early:
            assert end.code == 1
            assert f"PeerLost: rank {early} (stage {early}) is gone: {reason}" in end.output
            assert end.seconds < ends[early].seconds + 30


def test_ranks_finish_at_different_times(forks: Forks) -> None:
    slow, fast = run(forks, 2, "one_is_slow_at_the_end", 0, 4.0)
    assert (slow.code, fast.code) == (0, 0), slow.output + fast.output
    assert "rank 0 is done" in slow.output and "rank 1 is done" in fast.output


def test_a_rank_fails_while_the_others_wait_outside_the_engine(forks: Forks) -> None:
    failed, waiting = run(forks, 2, "one_fails_while_others_wait")
    assert failed.code == 1 and last_line(failed).endswith("OSError: disk full")
    assert waiting.code == 1 and "Connection closed by peer" in waiting.output


def test_a_rank_fails_while_the_others_wait_inside_deepspeed(forks: Forks) -> None:
    waiting, failed = run(forks, 2, "one_fails_in_a_collective_of_deepspeed")
    assert failed.code == 1 and "Can't pickle" in last_line(failed)
    assert waiting.code == 1 and "RemoteError: rank 1 failed: AttributeError: Can't pickle" in last_line(waiting)


@pytest.mark.parametrize(("size", "failing"), [(3, {"1": 0}), (2, {"0": 1, "1": 0})])
def test_an_all_reduction_is_never_completed(forks: Forks, size: int, failing: dict[str, int]) -> None:
    for rank, end in enumerate(run(forks, size, "some_fail_before_a_reduction", failing)):
        assert end.code == 1, end.output
        assert "ArithmeticError: no gradient today" in last_line(end)
        assert str(rank) in failing or "RemoteError: rank 1 failed" in last_line(end)


def test_all_ranks_fail_at_once(forks: Forks) -> None:
    for end in run(forks, 2, "all_fail_at_once", 2):
        assert end.code == 1
        assert "must give pairs (inputs, labels) of a micro-batch, got a tuple of length 3" in last_line(end)


def test_engines_one_after_the_other(forks: Forks) -> None:
    for end in run(forks, 2, "closes_twice"):
        assert end.code == 0, end.output


def test_an_engine_after_one_that_failed(forks: Forks) -> None:
    for rank, end in enumerate(run(forks, 2, "closes_after_an_error")):
        assert end.code == 0, end.output
        assert f"rank {rank} caught {'RemoteError: rank 0 failed: ' if rank else ''}ValueError: the data iterator" in end.output
        assert end.output.count(f"rank {rank} then got this engine stopped earlier") == 2
        assert f"rank {rank} trained again" in end.output


def forgotten(run: Run) -> list[str]:
    """What is still alive of an engine that was closed."""
    engine = run.engine()
    engine.train_batch(run.task.data())
    kept = {"engine": weakref.ref(engine), "transport": weakref.ref(engine._stage.mailbox.transport)}
    engine.close()
    del engine
    gc.collect()
    return [name for name, reference in kept.items() if reference() is not None]


@pytest.mark.parametrize("num_pipelines", [1, 2])
def test_nothing_is_kept_of_an_engine_that_was_closed(worlds: dict[int, World], num_pipelines: int) -> None:
    """Otherwise every engine would leave the threads of its process groups behind."""
    assert worlds[2].run(forgotten, Run(avgpipe={"num_pipelines": num_pipelines})) == [[], []]
