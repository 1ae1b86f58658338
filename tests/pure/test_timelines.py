"""Spans, their shares of the time, clocks, and the files they travel in; with traces written by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from avgpipe_ds.report.__main__ import main
from avgpipe_ds.report.clocks import on_one_clock
from avgpipe_ds.report.load import load
from avgpipe_ds.report.shares import CATEGORIES, shares_of
from avgpipe_ds.tracing.chrome import file_name, read, write
from avgpipe_ds.tracing.recorder import Recorder
from avgpipe_ds.tracing.spans import IDLE, TRAIN_BATCH, WAIT, Span, StageTrace

MS = 10**6
NOON_NS = 1_790_000_000 * 10**9


def span(name: str, start_ms: float, end_ms: float, *, detail: str = "", micro_batch: int = 0) -> Span:
    return Span(name, NOON_NS + round(start_ms * MS), NOON_NS + round(end_ms * MS), 0, 5, micro_batch, detail)


def stage(stage_id: int, *spans: Span, end_ms: float = 100, **changes: Any) -> StageTrace:
    place = {"rank": stage_id, "num_ranks": 2, "stage_id": stage_id, "num_stages": 2, "replica_id": 0}
    place |= {"num_pipelines": 1, "num_micro_batches": 2}
    return StageTrace(**({"run": "a"} | place | changes), window_ns=(NOON_NS, NOON_NS + round(end_ms * MS)), spans=spans)


FIRST = stage(
    0,
    span("ForwardPass", 10, 30),
    span("SendActivation", 30, 32),
    span(IDLE, 32, 60, detail="gradient"),
    span(WAIT, 32, 61, detail="gradient"),
    span("RecvGrad", 61, 62),
    span("BackwardPass", 62, 80),
    span("Averaging", 82, 83),
    span("OptimizerStep", 81, 86),
    span(TRAIN_BATCH, 5, 90),
)
LAST = stage(
    1,
    span(IDLE, 0, 33, detail="activation"),
    span("RecvActivation", 33, 34),
    span("ForwardPass", 34, 44),
    span("BackwardPass", 44, 56),
    span("SendGrad", 56, 58),
    span(TRAIN_BATCH, 0, 100),
)


def test_every_moment_belongs_to_the_innermost_span() -> None:
    first, last = shares_of([FIRST, LAST])
    assert first.seconds == pytest.approx(0.1)
    expected = {
        "compute": 0.38,
        "sending": 0.02,
        "waiting for gradients": 0.28,
        "optimizer step": 0.04,
        "averaging": 0.01,
        "executor": 0.85 - 0.38 - 0.02 - 0.28 - 0.05,
        "outside train_batch": 0.15,
    }
    assert first.shares == pytest.approx({category: expected.get(category, 0.0) for category in CATEGORIES})
    assert last.shares["waiting for activations"] == pytest.approx(0.33)
    assert last.shares["outside train_batch"] == pytest.approx(0)


def test_only_the_time_that_all_ranks_cover_counts() -> None:
    shorter = replace(LAST, window_ns=(NOON_NS + 20 * MS, NOON_NS + 70 * MS))
    first, last = shares_of([FIRST, shorter])
    assert (first.seconds, last.seconds) == (pytest.approx(0.05),) * 2
    assert first.shares["compute"] == pytest.approx((10 + 8) / 50)
    assert all(sum(one.shares.values()) == pytest.approx(1) for one in (first, last))


def test_a_file_gives_back_what_was_written(tmp_path: Path) -> None:
    write(tmp_path / "both.json", [FIRST, LAST])
    assert read(tmp_path / "both.json") == [FIRST, LAST]


def test_both_ends_of_a_message_have_one_flow(tmp_path: Path) -> None:
    """Perfetto connects an "s" and an "f" event of the same id; they must lie inside the spans that send and receive."""
    write(tmp_path / "both.json", [FIRST, LAST])
    events = json.loads((tmp_path / "both.json").read_text())["traceEvents"]
    flows = {kind: {e["id"]: (e["name"], e["pid"], e["ts"]) for e in events if e["ph"] == kind} for kind in "sf"}
    assert len(flows["s"]) == 2 and flows["s"].keys() == flows["f"].keys()
    origin_us = NOON_NS // 1000 - NOON_NS // 1000 % (86_400 * 10**6)
    for number, (name, pid, ts) in flows["s"].items():
        assert flows["f"][number][:2] == (name, 1 - pid)
        within = (30, 32) if name == "activation" else (56, 58)
        assert within[0] < (ts + origin_us - NOON_NS / 1000) / 1000 < within[1]


@pytest.mark.parametrize("skew_ms", [-700.0, -3.0, 2.5, 4000.0])
def test_clocks_are_put_right_by_messages(skew_ms: float) -> None:
    """The activation takes 1 ms from its sending to its use, the gradient 1 ms from the one to the other as well."""
    first = stage(0, span("SendActivation", 30, 32), span("RecvGrad", 57, 58))
    last = stage(1, span("RecvActivation", 31, 34), span("SendGrad", 56, 58))
    assert on_one_clock([first, last.shifted(round(skew_ms * MS))]) == [first, last]


def test_clocks_that_agree_are_left_alone() -> None:
    assert on_one_clock([LAST, FIRST]) == [FIRST, LAST]


def test_the_recorder_is_silent_until_it_is_started() -> None:
    recorder = Recorder()
    with recorder.span("ForwardPass"):
        recorder.nothing_to_do()
        recorder.can_go_on("data")
    assert recorder.stop() == []
    with recorder.span("ForwardPass"):  # still open when recording starts: it has no beginning
        recorder.start()
        with recorder.span("BackwardPass", pipeline_id=1, iteration=2, micro_batch=3):
            pass
        recorder.nothing_to_do()
        recorder.nothing_to_do()
        recorder.can_go_on("gradient")
        recorder.can_go_on("turn")
    spans = recorder.stop()
    assert [(s.name, s.pipeline_id, s.iteration, s.micro_batch, s.detail) for s in spans] == [
        ("BackwardPass", 1, 2, 3, ""),
        (IDLE, -1, -1, -1, "gradient"),
    ]
    assert all(s.end_ns >= s.start_ns for s in spans) and not recorder.recording


def test_a_span_is_recorded_though_its_block_raised() -> None:
    recorder = Recorder()
    recorder.start()
    with pytest.raises(KeyError), recorder.span("ForwardPass"):
        raise KeyError
    with pytest.raises(StopIteration), recorder.span("TakeData"):
        next(iter(()))
    assert [s.name for s in recorder.stop()] == ["ForwardPass", "TakeData"]


def written(directory: Path, *traces: StageTrace) -> Path:
    for trace in traces:
        write(directory / file_name(trace.rank), [trace])
    return directory


def test_a_folder_without_traces(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no .*rank-0.json: train with"):
        load(tmp_path)


def test_a_rank_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"lacks rank-1.json: copy"):
        load(written(tmp_path, FIRST))


def test_not_a_trace(tmp_path: Path) -> None:
    for text in ("", "[]", "{}", '{"otherData": {"format": "another"}}', '{"traceEvents": []}'):
        (tmp_path / file_name(0)).write_text(text)
        with pytest.raises(ValueError, match=r"rank-0.json is not a trace of avgpipe_ds"):
            load(tmp_path)


@pytest.mark.parametrize(
    "other",
    [
        replace(LAST, run="another"),
        replace(LAST, num_pipelines=2),
        replace(LAST, num_ranks=4),
        replace(LAST, window_ns=(NOON_NS + 500 * MS, NOON_NS + 600 * MS), spans=()),
    ],
    ids=["run", "pipelines", "ranks", "time"],
)
def test_traces_of_different_runs(tmp_path: Path, other: StageTrace) -> None:
    with pytest.raises(ValueError, match="different runs"):
        load(written(tmp_path, FIRST, other))


def test_a_trace_under_the_name_of_another_rank(tmp_path: Path) -> None:
    folder = written(tmp_path, FIRST, LAST)
    (folder / file_name(1)).write_text((folder / file_name(0)).read_text())
    with pytest.raises(ValueError, match="different runs"):
        load(folder)


def test_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    main([str(written(tmp_path, FIRST, LAST))])
    table = capsys.readouterr().out
    assert "38.0%" in table and "waiting for gradients" in table
    assert read(tmp_path / "trace.json") == [FIRST, LAST]
    assert [one["shares"]["compute"] for one in json.loads((tmp_path / "bubbles.json").read_text())] == [0.38, 0.22]
    assert (tmp_path / "timetable.png").read_bytes().startswith(b"\x89PNG")
    svg = (tmp_path / "timetable.svg").read_text()
    assert svg.count("#54a24b") >= 2 and "optimizer step" in svg, "a backward on each stage"


@pytest.mark.parametrize("arguments", [[], ["--iterations", "0"]])
def test_the_report_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path), *arguments])
    assert ended.value.code == 2
    assert ("--iterations must be at least 1" if arguments else "there is no") in capsys.readouterr().err
