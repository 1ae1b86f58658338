"""Which time is whose: a rank's main thread does one thing at a time, so every nanosecond belongs to the innermost span."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from avgpipe_ds.tracing.spans import WAIT, Span

__all__ = ["own_time"]


def own_time(spans: Sequence[Span]) -> Iterator[tuple[Span, list[tuple[int, int]]]]:
    """Each span of the main thread with those pieces of it that belong to no span inside it."""
    ordered = sorted((s for s in spans if s.name != WAIT), key=lambda span: (span.start_ns, -span.end_ns))
    pieces: list[list[tuple[int, int]]] = [[] for _ in ordered]
    open_spans: list[int] = []
    now_ns = 0

    def advance(to_ns: int) -> None:
        nonlocal now_ns
        if open_spans and to_ns > now_ns:
            pieces[open_spans[-1]].append((now_ns, to_ns))
        now_ns = max(now_ns, to_ns)

    for place, span in enumerate(ordered):
        while open_spans and ordered[open_spans[-1]].end_ns <= span.start_ns:
            advance(ordered[open_spans[-1]].end_ns)
            open_spans.pop()
        advance(span.start_ns)
        open_spans.append(place)
    while open_spans:
        advance(ordered[open_spans[-1]].end_ns)
        open_spans.pop()
    yield from zip(ordered, pieces, strict=True)
