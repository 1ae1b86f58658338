"""Traces as files of Chrome's trace event format, which Perfetto (ui.perfetto.dev) and chrome://tracing show.

A process is a stage, its threads are the accelerator and the pipelines. Messages are flows, whose ids follow from what they
carry: so the files of several ranks put together are a trace, too.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from avgpipe_ds.tracing.spans import IDLE, TRAIN_BATCH, Span, StageTrace

__all__ = ["file_name", "message_key", "read", "write"]

FORMAT = "avgpipe_ds trace 2"
_DAY_NS = 86_400 * 10**9
_SENT = {"SendActivation": ("activation", 0), "SendGrad": ("gradient", -1)}
_RECEIVED = {"RecvActivation": ("activation", -1), "RecvGrad": ("gradient", 0)}
_META = ("run", "rank", "num_ranks", "stage_id", "num_stages", "replica_id", "num_pipelines", "num_micro_batches")


def file_name(rank: int) -> str:
    """Where in the trace directory a rank's trace is."""
    return f"rank-{rank}.json"


def message_key(trace: StageTrace, span: Span) -> tuple[bool, tuple[Any, ...]] | None:
    """Whether a span sends, and which message it sends or receives: the same on both ends. None if it does neither."""
    for table, sends in ((_SENT, True), (_RECEIVED, False)):
        if span.name in table:
            what, offset = table[span.name]
            link = trace.stage_id + offset  # between stages link and link + 1
            return sends, (what, trace.replica_id, link, span.pipeline_id, span.iteration, span.micro_batch)
    return None


def write(path: Path, traces: Iterable[StageTrace]) -> None:
    """Write one trace, or those of several ranks together."""
    traces = list(traces)
    origin_ns = min(trace.window_ns[0] for trace in traces) // _DAY_NS * _DAY_NS  # keeps nanoseconds in a double
    events = [event for trace in traces for event in _events(trace, origin_ns)]
    meta = [{name: getattr(trace, name) for name in _META} | {"window_ns": trace.window_ns} for trace in traces]
    document = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"format": FORMAT, "origin_ns": origin_ns, "stages": meta},
    }
    path.write_text(json.dumps(document))


def read(path: Path) -> list[StageTrace]:
    """The traces in a file that `write` wrote.

    Raises:
        ValueError: it is no such file.

    """
    try:
        document = json.loads(path.read_text())
        other = document["otherData"]
        if other["format"] != FORMAT:
            raise ValueError(f"its format is {other['format']!r}, not {FORMAT!r}")
        spans: dict[int, list[Span]] = {stage["rank"]: [] for stage in other["stages"]}
        for event in document["traceEvents"]:
            if event["ph"] == "X":
                start_ns = other["origin_ns"] + round(event["ts"] * 1e3)
                spans[event["pid"]].append(Span(event["name"], start_ns, start_ns + round(event["dur"] * 1e3), **event["args"]))
        return [
            StageTrace(**(stage | {"window_ns": tuple(stage["window_ns"])}), spans=tuple(spans[stage["rank"]]))
            for stage in other["stages"]
        ]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a trace of avgpipe_ds: {type(error).__name__}: {error}") from error


def _events(trace: StageTrace, origin_ns: int) -> Iterator[dict[str, Any]]:
    replica = f", replica {trace.replica_id}" if trace.num_ranks > trace.num_stages else ""
    yield from _name("process", trace.rank, 0, f"stage {trace.stage_id}{replica} (rank {trace.rank})")
    yield from _name("thread", trace.rank, 0, "accelerator")
    for i in range(trace.num_pipelines):
        yield from _name("thread", trace.rank, 1 + i, f"pipeline {i}")
    for span in trace.spans:
        row = {"pid": trace.rank, "tid": 0 if span.name in (IDLE, TRAIN_BATCH) else 1 + span.pipeline_id}
        ts = (span.start_ns - origin_ns) / 1e3
        duration = (span.end_ns - span.start_ns) / 1e3
        args = {name: getattr(span, name) for name in ("pipeline_id", "iteration", "micro_batch", "detail")}
        yield {"ph": "X", "name": span.name, "cat": span.detail or "work", "ts": ts, "dur": duration, "args": args, **row}
        message = message_key(trace, span)
        if message is not None:
            sends, key = message
            flow = {"name": key[0], "cat": "message", "id": zlib.crc32(repr(key).encode()), "ts": ts + duration / 2, **row}
            yield flow | ({"ph": "s"} if sends else {"ph": "f", "bp": "e"})


def _name(what: str, pid: int, tid: int, name: str) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": f"{what}_name", "pid": pid, "tid": tid, "args": {"name": name}}
    yield {
        "ph": "M",
        "name": f"{what}_sort_index",
        "pid": pid,
        "tid": tid,
        "args": {"sort_index": pid if what == "process" else tid},
    }
