"""The progress of the training loop: a bar on a terminal, a line every few seconds elsewhere."""

import time
from collections.abc import Callable
from typing import Any

from common.narrator import Narrator

__all__ = ["TrainingProgress"]

_LINE_EVERY_S = 5.0


class TrainingProgress:
    """Shows iteration, loss, samples per second and the time left, on the rank whose narrator is enabled."""

    def __init__(self, narrator: Narrator, *, first_iteration: int, num_iterations: int) -> None:
        """Start at `first_iteration` of `num_iterations`."""
        self._narrator = narrator
        self._first, self._total = first_iteration, num_iterations
        self._done = first_iteration
        self._samples = 0
        self._paused_s = 0.0
        self._start = self._last_line = time.monotonic()
        self._bar: Any = None
        if narrator.on_terminal:
            from tqdm import tqdm  # type: ignore[import-untyped]

            self._bar = tqdm(
                total=num_iterations, initial=first_iteration, unit="iteration", dynamic_ncols=True, file=narrator.stream
            )
            narrator.bar = self._bar

    @property
    def trained_s(self) -> float:
        """Seconds since the start, without the pauses."""
        return time.monotonic() - self._start - self._paused_s

    @property
    def samples_per_s(self) -> float:
        """Samples trained per second, without the pauses."""
        return self._samples / max(self.trained_s, 1e-9)

    def advance(self, *, loss: float, samples: int) -> None:
        """Note that an iteration is done; a line is printed for the first, the last, and now and then between."""
        self._done += 1
        self._samples += samples
        if self._bar is not None:
            self._bar.set_postfix_str(f"loss {loss:.4f}, {self.samples_per_s:.1f} samples/s", refresh=False)
            self._bar.update()
            self._narrator.spoke()
            return
        now = time.monotonic()
        if now - self._last_line >= _LINE_EVERY_S or self._done in (self._first + 1, self._total):
            self._last_line = now
            left_s = (self._total - self._done) * self.trained_s / (self._done - self._first)
            self._narrator.say(
                f"iteration {self._done}/{self._total}  loss {loss:.4f}  {self.samples_per_s:.1f} samples/s  {left_s:.0f} s left"
            )

    def paused(self, work: Callable[[], None]) -> None:
        """Run `work` (a validation, a checkpoint) without counting its time as training."""
        begin = time.monotonic()
        work()
        self._paused_s += time.monotonic() - begin

    def close(self) -> None:
        """Leave the bar as it is and give the terminal back."""
        if self._bar is not None:
            self._narrator.bar = None
            self._bar.close()
