"""What a run says while it works.

A start takes a while (imports, a download, a model to load, the first iteration), and on the outside waiting looks like
hanging. So rank 0 says what is being waited for, and a thread repeats it whenever nothing was said for some seconds. The
thread, rather than calls in the loops, because what takes long is often a single call into a library.
"""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Protocol, TextIO

__all__ = ["Bar", "Narrator"]


class Bar(Protocol):
    """A progress bar that owns the last line of a terminal."""

    def refresh(self) -> object:
        """Draw the bar again, with the time as it is now."""

    def clear(self) -> object:
        """Remove the bar from the line."""


class Narrator:
    """Prints lines with the elapsed time, and repeats the current activity when it has been silent for `silence_s`."""

    def __init__(self, *, enabled: bool = True, stream: TextIO | None = None, silence_s: float = 8.0) -> None:
        """Start the clock; with `enabled` false (every rank but 0) nothing is ever printed."""
        self.enabled = enabled
        self.stream = sys.stdout if stream is None else stream
        self.bar: Bar | None = None
        self._silence_s = silence_s
        self._start = self._activity_start = self._last_said = time.monotonic()
        self._activity: str | None = None
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._break_silence, name="narrator", daemon=True)

    def __enter__(self) -> "Narrator":
        if self.enabled:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    @property
    def on_terminal(self) -> bool:
        """Whether a person watches, so that a line may be drawn over."""
        return self.enabled and self.stream.isatty()

    def say(self, text: str) -> None:
        """Print one line with the elapsed seconds."""
        self.write(f"[{self.elapsed_s:6.1f} s] {text}")

    def write(self, line: str) -> None:
        """Print one line as it is."""
        if not self.enabled:
            return
        with self._lock:
            if self.bar is not None:
                self.bar.clear()
            print(line, file=self.stream, flush=True)
            if self.bar is not None:
                self.bar.refresh()
            self._last_said = time.monotonic()

    def spoke(self) -> None:
        """Note that something else, such as a progress bar, was just seen to move."""
        self._last_said = time.monotonic()

    def working_on(self, activity: str | None) -> None:
        """Set what the thread repeats in a long silence."""
        self._activity, self._activity_start = activity, time.monotonic()

    @contextmanager
    def phase(self, activity: str) -> Iterator[None]:
        """Say that `activity` begins, and, if it took a noticeable time, how long it took."""
        self.say(f"{activity} ...")
        outer, outer_start = self._activity, self._activity_start
        self.working_on(activity)
        begin = self._activity_start
        try:
            yield
        finally:
            self._activity, self._activity_start = outer, outer_start
        took_s = time.monotonic() - begin
        if took_s > 1:
            self.say(f"{activity}: {took_s:.1f} s")

    def _break_silence(self) -> None:
        while not self._closed.wait(min(0.5, self._silence_s / 4)):
            activity, now = self._activity, time.monotonic()
            if activity is None or now - self._last_said < self._silence_s:
                continue
            if self.bar is not None:
                with self._lock:
                    self.bar.refresh()
                    self.spoke()
            else:
                self.say(f"still {activity} ({now - self._activity_start:.0f} s)")
