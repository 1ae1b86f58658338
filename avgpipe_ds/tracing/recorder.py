"""Collects the spans of one rank. Switched off, a span is an empty block."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from avgpipe_ds.tracing.spans import IDLE, Span

__all__ = ["Recorder"]


class Recorder:
    """Used by the main thread only. Off until `start`.

    Times are `time.perf_counter_ns`, moved once, by `start`, to the wall clock, so that ranks of one machine agree.
    """

    def __init__(self) -> None:
        self.recording = False
        self._spans: list[Span] = []
        self._offset_ns = 0
        self._idle_since_ns: int | None = None

    def start(self) -> None:
        """Record from now on."""
        self._spans, self._idle_since_ns = [], None
        self._offset_ns = time.time_ns() - time.perf_counter_ns()
        self.recording = True

    def stop(self) -> list[Span]:
        """Record no more; returns what was recorded. Spans that are still open are left out."""
        spans, self._spans = self._spans, []
        self.recording = False
        return spans

    def now_ns(self) -> int:
        """The time on the clock of the spans."""
        return time.perf_counter_ns() + self._offset_ns

    @contextmanager
    def span(
        self, name: str, *, pipeline_id: int = -1, iteration: int = -1, micro_batch: int = -1, detail: str = ""
    ) -> Iterator[None]:
        """Record the block."""
        if not self.recording:
            yield
            return
        start_ns = self.now_ns()
        try:
            yield
        finally:
            if self.recording:
                self._spans.append(Span(name, start_ns, self.now_ns(), pipeline_id, iteration, micro_batch, detail))

    def nothing_to_do(self) -> None:
        """The rank is about to block. What it waited for is known only when something can go on."""
        if self.recording and self._idle_since_ns is None:
            self._idle_since_ns = self.now_ns()

    def can_go_on(self, waited_for: str) -> None:
        """Something can go on, which had waited for this."""
        if self._idle_since_ns is not None:
            if self.recording:
                self._spans.append(Span(IDLE, self._idle_since_ns, self.now_ns(), detail=waited_for))
            self._idle_since_ns = None
