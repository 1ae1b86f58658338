"""Runs N instruction streams on one accelerator.

A stream is a generator: it runs one step of its pipeline each time it is resumed, and yields a `Wait` that says what it needs
next. The executor resumes whichever stream can go on and has the best priority, and blocks only when none can. It knows nothing
of DeepSpeed, of schedules or of tensors, so it is tested with streams written by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass

from avgpipe_ds.execution.mailbox import Mailbox
from avgpipe_ds.tracing.recorder import Recorder

__all__ = ["Executor", "Stream", "Wait"]


@dataclass(frozen=True, slots=True)
class Wait:
    """What a stream needs before it can go on.

    Attributes:
        ready: cheap, without side effects that matter; asked again after every arrival.
        priority: smaller goes first among the streams that are ready.
        waits_for: what `ready` asks for, as timelines name it.

    """

    ready: Callable[[], bool]
    priority: tuple[int, ...]
    waits_for: str


Stream = Generator[Wait, None, None]


class Executor:
    """Multiplexes streams. `run` may be called again and again: streams keep their place in between.

    Args:
        mailbox: whose arrivals make streams ready.
        recorder: told when no stream can go on, and which one did then.

    """

    def __init__(self, mailbox: Mailbox, recorder: Recorder) -> None:
        self._mailbox = mailbox
        self._recorder = recorder
        self._streams: list[Stream] = []
        self._waits: list[Wait] = []

    def add(self, stream: Stream) -> None:
        """Start a stream: it runs up to its first wait."""
        self._waits.append(next(stream))
        self._streams.append(stream)

    @property
    def idle(self) -> bool:
        """Whether all streams have ended."""
        return not self._streams

    def clear(self) -> None:
        """Drop all streams, wherever they are."""
        for stream in self._streams:
            stream.close()
        self._streams.clear()
        self._waits.clear()

    def run(self, done: Callable[[], bool]) -> None:
        """Resume streams until `done()`. What is in flight then stays where it is until the next call.

        Raises:
            Exception: what a stream raised, or what the mailbox reports of other ranks.

        """
        while True:
            self._mailbox.drain()  # before `done` and `ready`: what arrives after they were asked ends the wait below
            if done():
                return
            ready = [(wait.priority, place) for place, wait in enumerate(self._waits) if wait.ready()]
            if not ready:
                self._recorder.nothing_to_do()
                self._mailbox.wait()
                continue
            place = min(ready)[1]
            self._recorder.can_go_on(self._waits[place].waits_for)
            try:
                self._waits[place] = next(self._streams[place])
            except StopIteration:
                del self._streams[place], self._waits[place]
