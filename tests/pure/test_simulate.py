"""The simulator against pictures drawn by hand, closed formulas, and schedules that must be refused."""

from __future__ import annotations

import statistics
from pathlib import Path
from textwrap import dedent

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from avgpipe_ds.errors import ScheduleError
from avgpipe_ds.schedules.__main__ import main
from avgpipe_ds.schedules.actions import Action
from avgpipe_ds.schedules.costs import StageCosts
from avgpipe_ds.schedules.plans import Plan, forward_only_plan, most_stored, plan_all_stages
from avgpipe_ds.schedules.simulate import Simulation, simulate, timetable, validate

FREE = StageCosts.uniform(message_s=0.0)
SETTINGS = [(2, 4), (4, 4), (4, 8), (8, 8)]


def parse(*rows: str) -> tuple[Plan, ...]:
    return tuple(tuple(Action.parse(text) for text in row.split()) for row in rows)


def one_f_one_b(K: int, M: int) -> tuple[Plan, ...]:
    return plan_all_stages("1f1b", num_stages=K, num_micro_batches=M)


def mean_busy(simulation: Simulation) -> float:
    return sum(simulation.busy_fraction) / simulation.num_stages


def test_golden_timetable():
    """Messages of a third of a forward; a cell of three columns is one second."""
    drawn = simulate(one_f_one_b(2, 3), StageCosts.uniform(message_s=1 / 3), num_iterations=1)
    expected = """\
        stage 0  F0 F1 ........B0--- F2 B1--- .....B2---
        stage 1  ....F0 B0--- F1 B1--- ..F2 B2--- ......."""
    # Stage 1 ends B0 at 4 1/3; stage 0 has it at 4 2/3, ends F2 at 7 2/3, which arrives at 8; B2 ends at 11 and 13 1/3.
    assert timetable(drawn) == dedent(expected)
    assert drawn.makespan_s == pytest.approx(13 + 1 / 3)


def test_golden_timetable_of_two_pipelines():
    """While pipeline 0 waits, pipeline 1 computes; labels start with the pipeline."""
    drawn = simulate(one_f_one_b(2, 2), FREE, num_pipelines=2, num_iterations=1)
    expected = """\
        stage 0  0F0 0F1 1F0 1F1 0B0---- ....0B1---- ....1B0---- ....1B1----
        stage 1  ....0F0 0B0---- 0F1 0B1---- 1F0 1B0---- 1F1 1B1---- ........"""
    assert timetable(drawn) == dedent(expected)


def test_timetable_of_bare_plans():
    assert timetable(parse("F0 F1 B0 B1", "F0 B0 F1 B1")) == "stage 0   F0  F1  B0  B1\nstage 1   F0  B0  F1  B1"


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(1, 8), st.integers(0, 8), st.integers(1, 3), st.booleans(), st.booleans())
def test_every_schedule_runs(K, M, a, N, barrier, blocking_sends):
    """Valid, without deadlock, every computation once, none overlapping on a stage or before its message."""
    plans = plan_all_stages("advance_forward", num_stages=K, num_micro_batches=M, advance=a)
    validate(plans)
    result = simulate(plans, num_pipelines=N, num_iterations=3, barrier=barrier, blocking_sends=blocking_sends)
    assert len(result.events) == 3 * N * K * 2 * M
    assert result.peak_stored == tuple(min(M, (K - 1 - k) * (1 + a) + 1) for k in range(K))
    ends = {(e.stage_id, e.pipeline_id, e.iteration, e.action.kind, e.action.micro_batch): e.end_s for e in result.events}
    assert len(ends) == len(result.events)
    free = [0.0] * K
    for e in result.events:
        assert e.start_s >= free[e.stage_id] - 1e-9
        free[e.stage_id] = e.end_s
        source = e.stage_id + (-1 if e.action.kind == "F" else 1)
        if 0 <= source < K:
            sent = ends[source, e.pipeline_id, e.iteration, e.action.kind, e.action.micro_batch]
            assert e.start_s >= sent + 0.2 - 1e-6


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.integers(1, 8))
def test_bubble_of_one_pipeline(K, M):
    """With free messages 1F1B idles (K-1)/(M+K-1) of the time."""
    result = simulate(one_f_one_b(K, M), FREE)
    assert result.seconds_per_iteration == pytest.approx(3 * (M + K - 1))
    for busy in result.busy_fraction:
        assert 1 - busy == pytest.approx((K - 1) / (M + K - 1))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 5), st.integers(1, 6), st.integers(2, 3))
def test_no_pipeline_runs_more_than_one_iteration_ahead(K, M, N):
    """Its step t+1 has to wait for everyone's step t, so no pipeline computes t+2 while another still computes t."""
    result = simulate(one_f_one_b(K, M), num_pipelines=N, num_iterations=5)
    for k in range(K):
        last_end = [max(e.end_s for e in result.events if e.stage_id == k and e.iteration == t) for t in range(5)]
        first_start = [min(e.start_s for e in result.events if e.stage_id == k and e.iteration == t) for t in range(5)]
        assert all(first_start[t + 2] >= last_end[t] - 1e-9 for t in range(3))


def test_steps_are_taken_in_pipeline_order():
    """A pipeline may finish early, but computes the next batch only after those before it have stepped."""
    result = simulate(one_f_one_b(4, 4), num_pipelines=3, num_iterations=6)
    for k in range(4):
        done = {}
        for e in result.events:
            if e.stage_id == k:
                done[e.iteration, e.pipeline_id] = max(done.get((e.iteration, e.pipeline_id), 0.0), e.end_s)
        for e in result.events:
            if e.stage_id == k and e.iteration > 0:
                assert all(done[e.iteration - 1, earlier] <= e.start_s + 1e-9 for earlier in range(e.pipeline_id))


# Busy fractions: 1F1B with blocking sends, with asynchronous sends; N = 2 with a barrier; N = 2 and N = 3 free-running.
BUSY = {
    (2, 4): (0.750, 0.759, 0.863, 1.000, 1.000),
    (4, 4): (0.517, 0.522, 0.702, 0.938, 1.000),
    (4, 8): (0.652, 0.663, 0.819, 0.968, 1.000),
    (8, 8): (0.476, 0.478, 0.654, 0.909, 0.972),
}


@pytest.mark.parametrize("K, M", SETTINGS)
def test_busy_fractions(K, M):
    """The table of docs/schedules.md."""
    runs = [
        {"blocking_sends": True},
        {},
        {"num_pipelines": 2, "barrier": True},
        {"num_pipelines": 2},
        {"num_pipelines": 3},
    ]
    got = [mean_busy(simulate(one_f_one_b(K, M), num_iterations=32, **run)) for run in runs]
    assert got == pytest.approx(BUSY[K, M], abs=0.002)


OTHER_ORDERS = {
    "iteration, backward, pipeline": lambda *, iteration, pipeline_id, kind: (iteration, kind == "F", pipeline_id),
    "iteration, pipeline": lambda *, iteration, pipeline_id, kind: (iteration, pipeline_id),
    "backward, pipeline": lambda *, iteration, pipeline_id, kind: (kind == "F", pipeline_id),
    "forward, iteration, pipeline": lambda *, iteration, pipeline_id, kind: (kind == "B", iteration, pipeline_id),
}


@pytest.mark.parametrize("name", OTHER_ORDERS)
@pytest.mark.parametrize("message_s, backward_s", [(0.2, 2.0), (0.05, 2.0)])
def test_no_other_order_is_better(name, message_s, backward_s):
    for K, M in SETTINGS:
        for N in (1, 2, 3):
            costs = StageCosts.uniform(message_s=message_s, backward_s=backward_s)
            ours = mean_busy(simulate(one_f_one_b(K, M), costs, num_pipelines=N))
            other = mean_busy(simulate(one_f_one_b(K, M), costs, num_pipelines=N, priority=OTHER_ORDERS[name]))
            assert ours >= other - 0.005, (K, M, N)


seconds = st.integers(1, 20)


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(1, 10), st.integers(0, 10), seconds, seconds, st.integers(0, 30))
def test_time_of_advance_forward(K, M, a, f, b, m):
    """What docs/schedules.md says of one pipeline: no advance makes it slower, and a(f+b) >= 2m gives the time of GPipe."""

    def makespan(name: str, advance: int = 0) -> float:
        plans = plan_all_stages(name, num_stages=K, num_micro_batches=M, advance=advance)
        return simulate(plans, StageCosts.uniform(f, b, m), num_iterations=1).makespan_s

    gpipe = (K - 1) * (f + b + 2 * m) + M * (f + b)
    assert makespan("gpipe") == gpipe, "nothing is shorter"
    assert gpipe <= makespan("advance_forward", a + 1) <= makespan("advance_forward", a) <= makespan("1f1b")
    hidden = K == 1 or M <= a + 2 or 2 * m <= a * (f + b)
    assert (makespan("advance_forward", a) == gpipe) == hidden


# Seconds per batch with messages of 1 s: 1F1B; uniform advance 1, 2; advance 1, 2; GPipe. Then what stage 0 stores.
ADVANCE = {
    (2, 8, 1): [(35, 2), (35, 3), (33, 4), (29, 3), (29, 4), (29, 8)],
    (4, 8, 1): [(49, 4), (47, 5), (45, 6), (39, 7), (39, 8), (39, 8)],
    (4, 16, 1): [(85, 4), (83, 5), (81, 6), (63, 7), (63, 10), (63, 16)],
    (2, 8, 2): [(24, 2), (25, 3), (25, 4), (24, 3), (24, 4), (24, 8)],
    (4, 8, 2): [(28, 4), (29, 5), (28.5, 6), (24, 7), (24, 8), (27.5, 8)],
    (8, 16, 2): [(60.15, 8), (61, 9), (60.5, 10), (48, 15), (51, 16), (57.5, 16)],
}


@pytest.mark.parametrize("K, M, N", ADVANCE)
def test_advance_grows_towards_the_first_stage(K, M, N):
    """The table of docs/schedules.md; its first row is the paper's K = 2, M = 8: the time of GPipe, 3 stored micro-batches."""

    def measured(name: str, advance: int = 0, uniform: int = 0) -> tuple[float, int]:
        # 1F1B on the first K of K + a stages warms up by a forwards more than on K stages.
        plans = plan_all_stages(name, num_stages=K + uniform, num_micro_batches=M, advance=advance)[:K]
        result = simulate(plans, StageCosts.uniform(message_s=1.0), num_pipelines=N)
        return round(result.seconds_per_iteration / N, 2), result.peak_stored[0]

    assert ADVANCE[K, M, N] == [
        measured("1f1b"),
        measured("1f1b", uniform=1),
        measured("1f1b", uniform=2),
        measured("advance_forward", 1),
        measured("advance_forward", 2),
        measured("gpipe"),
    ]


def test_the_slowest_stage_sets_the_pace():
    """With enough pipelines it computes all the time, and the others as much as their share."""
    costs = [StageCosts(activation_s=0.1, gradient_s=0.1, forward_s=f, backward_s=2 * f) for f in (1.0, 1.5, 0.5)]
    result = simulate(one_f_one_b(3, 4), costs, num_pipelines=4)
    assert result.seconds_per_iteration == pytest.approx(4 * 4 * 4.5, rel=0.01)
    assert result.busy_fraction == pytest.approx((2 / 3, 1.0, 1 / 3), abs=0.02)


@pytest.mark.parametrize("direction", ["activation_s", "gradient_s"])
def test_a_shared_link_can_set_the_pace(direction):
    """Messages of 5 s and 3 s of computation: the link is what is busy all the time."""
    costs = StageCosts(**{"activation_s": 0.1, "gradient_s": 0.1, direction: 5.0})
    runs = [simulate(one_f_one_b(2, 4), costs, num_pipelines=5, num_iterations=24, shared_links=one) for one in (False, True)]
    assert [run.seconds_per_iteration / 20 for run in runs] == pytest.approx([3.0, 5.0], rel=0.03)


def test_steps_take_time_and_go_first():
    alone = simulate(one_f_one_b(1, 2), StageCosts(step_s=1.5), num_pipelines=1, num_iterations=4)
    assert alone.seconds_per_iteration == pytest.approx(2 * 3 + 1.5)
    several = simulate(one_f_one_b(1, 2), StageCosts(step_s=1.5), num_pipelines=3, num_iterations=4)
    assert several.seconds_per_iteration == pytest.approx(3 * (2 * 3 + 1.5))
    starts = [event.start_s for event in several.events if event.iteration == 1 and event.pipeline_id == 0]
    ends = [event.end_s for event in several.events if event.iteration == 0 and event.pipeline_id == 0]
    assert not any(max(ends) < start < max(ends) + 1.5 for start in starts)


def test_the_clipping_norm_waits_for_all_stages():
    """One pipeline, two stages, M = 1: stage 1 has its gradients first, and steps only when stage 0 has them, too."""
    plans, costs = one_f_one_b(2, 1), StageCosts(activation_s=0.5, gradient_s=0.5, step_s=1.0)
    assert simulate(plans, costs, num_iterations=2).makespan_s == 2 * 7 + 1
    # Stage 1 has its gradients at 4.5, stage 0 at 7; the next batch reaches stage 1 at 9.5.
    slow = [costs, StageCosts(activation_s=0.5, gradient_s=0.5, step_s=4.0)]
    assert simulate(plans, slow, num_iterations=2).makespan_s == 15
    assert simulate(plans, slow, num_iterations=2, clipping=True).makespan_s == 15 + (7 + 4 - 9.5)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(1, 6),
    st.integers(0, 3),
    st.integers(1, 3),
    st.booleans(),
    st.booleans(),
    st.lists(
        st.tuples(st.integers(1, 4), st.integers(1, 8), st.integers(0, 9), st.integers(0, 9), st.integers(0, 5)), min_size=5
    ),
)
def test_no_cost_is_lost(K, M, a, N, shared_links, clipping, costs):
    """However costs differ, nothing deadlocks and nothing is faster than the busiest stage or the longest chain."""
    names = ("forward_s", "backward_s", "activation_s", "gradient_s", "step_s")
    stages = [StageCosts(**dict(zip(names, one, strict=True))) for one in costs[:K]]
    plans = plan_all_stages("advance_forward", num_stages=K, num_micro_batches=M, advance=a)
    run = simulate(plans, stages, num_pipelines=N, num_iterations=4, shared_links=shared_links, clipping=clipping)
    work = max(N * (M * (one.forward_s + one.backward_s) + one.step_s) for one in stages)
    chain = sum(one.forward_s + one.backward_s for one in stages)
    chain += sum(one.activation_s for one in stages[:-1]) + sum(one.gradient_s for one in stages[1:])
    assert run.makespan_s >= max(4 * work - max(one.step_s for one in stages) * N, 4 * chain) - 1e-6


@pytest.mark.parametrize("bad", [{"forward_s": 0}, {"backward_s": -1}, {"activation_s": -1}, {"step_s": float("nan")}])
def test_bad_costs(bad):
    with pytest.raises(ValueError, match=f"{next(iter(bad))} must be"):
        StageCosts(**bad)


@pytest.mark.parametrize(
    "rows, message, marked",
    [
        (("F0 F1 B0 B1", "F0 F1 B1 B0"), "expected B0, got B1", "[B1]"),
        (("F0 F1 B0 B1", "F0 B0 B1 F1"), "B1 comes before its forward", "[B1]"),
        (("F0 F1 B0 B1", "F0 F0 B0 B1"), "expected F1, got F0", "[F0]"),
        (("F0 F1 B0 B1", "F1 F0 B0 B1"), "expected F0, got F1", "[F1]"),
        (("F0 F1 B0 B1", "F0 B0 F1"), "ends after", "[end]"),
        (("F0 F1 B0 B1", "F0 B0"), "ends after", "[end]"),
    ],
)
def test_invalid_plans_are_shown(rows, message, marked):
    with pytest.raises(ScheduleError) as caught:
        validate(parse(*rows))
    text = str(caught.value)
    assert message in text and "stage 1" in text
    assert [line for line in text.splitlines() if marked in line] == [text.splitlines()[2]], "marked in the row of stage 1"


def test_forward_only_plans():
    plans = (forward_only_plan(num_micro_batches=3),) * 2
    validate(plans, forward_only=True)
    assert simulate(plans, FREE, num_iterations=1).makespan_s == pytest.approx(4)
    with pytest.raises(ScheduleError, match="ends after"):
        validate(plans)
    with pytest.raises(ScheduleError, match="forward-only"):
        validate(one_f_one_b(2, 3), forward_only=True)


def test_no_stages():
    with pytest.raises(ScheduleError, match="at least one stage"):
        validate(())


def test_deadlock_is_shown():
    """Stage 0 wants a gradient before it sends micro-batch 1, stage 1 wants micro-batch 1 before it makes a gradient."""
    plans = parse("F0 B0 F1 B1", "F0 F1 B0 B1")
    validate(plans)
    with pytest.raises(ScheduleError) as caught:
        simulate(plans)
    text = str(caught.value)
    assert "stage 0 at B0 waits for stage 1" in text and "stage 1 at F1 waits for stage 0" in text
    assert text.splitlines()[-2:] == ["stage 0   F0  [B0]  F1   B1   end", "stage 1   F0  [F1]  B0   B1   end"]


@pytest.mark.parametrize("bad", [{"num_pipelines": 0}, {"num_iterations": 0}, {"costs": [StageCosts()]}])
def test_bad_numbers(bad):
    with pytest.raises(ValueError, match="got"):
        simulate(one_f_one_b(2, 2), **bad)


def test_command_line(capsys):
    main("--schedule advance_forward --stages 2 --micro-batches 4 --advance 1 --pipelines 2".split())
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("stage 0  0F0 0F1 0A2 ")
    assert printed[1].startswith("stage 1  ")
    assert printed[2] == "steady state: 24 s per iteration of 2 batch(es)"
    assert printed[4] == "stored micro-batches per stage and pipeline: 3 1"


def test_command_line_reports_bad_arguments(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--stages", "0"])
    assert caught.value.code == 2
    assert "num_stages must be at least 1, got 0" in capsys.readouterr().err


def documented_commands() -> list[tuple[str, list[str]]]:
    """(arguments, expected output) of every command in docs/schedules.md."""
    text = (Path(__file__).parents[2] / "docs" / "schedules.md").read_text()
    blocks = [[line[4:] for line in block.splitlines()] for block in text.split("\n\n") if block.startswith("    $ ")]
    return [(command.removeprefix("$ python -m avgpipe_ds.schedules "), output) for command, *output in blocks]


@pytest.mark.parametrize("arguments, output", documented_commands())
def test_documentation_shows_what_is_printed(arguments, output, capsys):
    main(arguments.split())
    assert capsys.readouterr().out.splitlines() == output


@given(
    K=st.integers(1, 5), M=st.integers(1, 6), N=st.integers(1, 4), a=st.integers(0, 3), message=st.sampled_from([0.0, 0.3, 2.0])
)
def test_pipelines_together_store_at_most_the_bound(K, M, N, a, message):
    plans = plan_all_stages("advance_forward", num_stages=K, num_micro_batches=M, advance=a)
    found = simulate(plans, StageCosts.uniform(message_s=message), num_pipelines=N, num_iterations=4)
    bounds = most_stored(plans, N)
    assert all(1 <= one <= bound for one, bound in zip(found.peak_together, bounds, strict=True))
    assert N > 1 or found.peak_together == found.peak_stored
    assert found.peak_together[-1] == 1


def test_times_that_vary():
    """Which computation draws what depends on its place only, and the opposite variation draws the opposite."""

    def lengths(variation, **options):
        events = simulate(one_f_one_b(3, 4), num_pipelines=2, num_iterations=8, variation=variation, **options).events
        return {(e.stage_id, e.pipeline_id, e.iteration, e.action): e.end_s - e.start_s for e in events}

    more, less, slow_links = lengths(0.1), lengths(-0.1), lengths(0.1, costs=StageCosts.uniform(message_s=2.0))
    assert more == pytest.approx(slow_links)
    for key, length in more.items():
        mean = 1.0 if key[3].kind == "F" else 2.0
        assert length - mean == pytest.approx(mean - less[key])
    spread = statistics.stdev(length if key[3].kind == "F" else length / 2 for key, length in more.items())
    assert 0.08 < spread < 0.12
    assert lengths(0.1, seed=1) != more
