"""Draws the timetable of a run, as in the paper's figure 7.

A band is a stage, a line in it a pipeline; boxes are computations with the number of their micro-batch, the shade behind them is
what the accelerator waited for when it could compute for no pipeline.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from avgpipe_ds.report.load import common_window
from avgpipe_ds.tracing.chrome import message_key
from avgpipe_ds.tracing.spans import AVERAGING, CLIPPING_NORM, IDLE, OPTIMIZER_STEP, TRAIN_BATCH, Span, StageTrace

__all__ = ["draw"]

_BOXES = {
    "ForwardPass": ("forward", "#4c78a8"),
    "AdvanceForwardPass": ("advance forward", "#9ecae9"),
    "BackwardPass": ("backward", "#54a24b"),
    CLIPPING_NORM: ("optimizer step", "#b279a2"),
    OPTIMIZER_STEP: ("optimizer step", "#b279a2"),
    AVERAGING: ("averaging", "#e45756"),
}
_SHADES = {
    "activation": ("waits for an activation", "#f5e6c8"),
    "gradient": ("waits for a gradient", "#e3f0d8"),
    "peers": ("waits for peers", "#ead9ea"),
    "turn": ("waits for its turn", "#f3d9d9"),
    "data": ("waits for data", "#dddddd"),
}
_WIDTH_IN, _LINE_IN = 18.0, 0.32
_NARROWEST_LABELLED = 0.006  # of the picture's width


def draw(traces: list[StageTrace], directory: Path, *, iterations: int) -> list[Path]:
    """Write timetable.png and timetable.svg.

    Args:
        traces: of all ranks.
        directory: where to.
        iterations: how many `train_batch` calls of the first rank to show.

    Returns:
        The files.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.

    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    start_ns, end_ns = _shown(traces, iterations)
    lines = sum(trace.num_pipelines + 0.5 for trace in traces)
    figure = Figure(figsize=(_WIDTH_IN, 1.2 + _LINE_IN * lines), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    legend: dict[str, Any] = {}
    places: dict[Any, tuple[float, float]] = {}
    ticks: list[tuple[float, str]] = []
    top = 0.0
    for trace in traces:
        for i in range(trace.num_pipelines):
            ticks.append((top + i + 0.5, f"stage {trace.stage_id}, pipeline {i}"))
        _draw_stage(axes, trace, top, (start_ns, end_ns), legend)
        _collect_messages(axes, trace, top, start_ns, places)
        top += trace.num_pipelines + 0.5
    axes.set_xlim(0, (end_ns - start_ns) / 1e6)
    axes.set_ylim(top - 0.5, 0)
    axes.set_yticks([y for y, _ in ticks], [text for _, text in ticks], fontsize=8)
    axes.set_xlabel("ms")
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.legend(legend.values(), legend.keys(), loc="outside upper center", ncols=len(legend), fontsize=8, frameon=False)
    files = [directory / "timetable.png", directory / "timetable.svg"]
    for file in files:
        figure.savefig(file, dpi=120)
    return files


def _shown(traces: list[StageTrace], iterations: int) -> tuple[int, int]:
    """The part of the common window that the first iterations take."""
    start_ns, end_ns = common_window(traces)
    ends = sorted(s.end_ns for s in traces[0].spans if s.name == TRAIN_BATCH and s.end_ns > start_ns)
    return start_ns, min(end_ns, ends[min(iterations, len(ends)) - 1] if ends else end_ns)


def _draw_stage(axes: Any, trace: StageTrace, top: float, shown_ns: tuple[int, int], legend: dict[str, Any]) -> None:
    start_ns, end_ns = shown_ns
    for span in _visible(trace, shown_ns):
        left, width = (span.start_ns - start_ns) / 1e6, (span.end_ns - span.start_ns) / 1e6
        if span.name == IDLE and span.detail in _SHADES:
            name, colour = _SHADES[span.detail]
            bar = axes.barh(top, width, trace.num_pipelines, left, align="edge", color=colour, linewidth=0, zorder=0)
        elif span.name in _BOXES:
            name, colour = _BOXES[span.name]
            line = top + span.pipeline_id
            bar = axes.barh(line + 0.1, width, 0.8, left, align="edge", color=colour, edgecolor="white", linewidth=0.4, zorder=2)
            if span.micro_batch >= 0 and width * 1e6 > _NARROWEST_LABELLED * (end_ns - start_ns):
                middle = max(0.0, left) + (min(left + width, (end_ns - start_ns) / 1e6) - max(0.0, left)) / 2
                axes.text(
                    middle, line + 0.5, str(span.micro_batch), ha="center", va="center", fontsize=6, color="white", zorder=3
                )
        else:
            continue
        legend.setdefault(name, bar)


def _visible(trace: StageTrace, shown_ns: tuple[int, int]) -> Iterator[Span]:
    """In the order of their starts, so that what lies inside a span is drawn on top of it."""
    for span in sorted(trace.spans, key=lambda span: span.start_ns):
        if span.end_ns > shown_ns[0] and span.start_ns < shown_ns[1]:
            yield span


def _collect_messages(axes: Any, trace: StageTrace, top: float, start_ns: int, places: dict[Any, tuple[float, float]]) -> None:
    """Connect both ends of each message; whichever comes second in the order of stages draws it."""
    for span in trace.spans:
        message = message_key(trace, span)
        if message is None:
            continue
        sends, key = message
        here = ((span.start_ns if sends else span.end_ns) - start_ns) / 1e6, top + span.pipeline_id + 0.5
        there = places.pop(key, None)
        if there is None:
            places[key] = here
        else:
            axes.plot([there[0], here[0]], [there[1], here[1]], color="#555555", linewidth=0.4, alpha=0.6, zorder=1)
