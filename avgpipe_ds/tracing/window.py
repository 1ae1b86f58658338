"""When a rank records, and where it writes what it recorded."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from avgpipe_ds.config import TraceConfig
from avgpipe_ds.errors import ConfigError
from avgpipe_ds.tracing import chrome
from avgpipe_ds.tracing.recorder import Recorder
from avgpipe_ds.tracing.spans import TRAIN_BATCH, StageTrace

__all__ = ["TraceWindow", "prepare_directory"]

logger = logging.getLogger(__name__)


class TraceWindow:
    """Records some calls of `train_batch`, counted from the start of this engine, and writes them when they are over.

    Args:
        config: None for no trace.
        recorder: switched on and off here.
        place: the fields of `StageTrace` other than window and spans.

    """

    def __init__(self, config: TraceConfig | None, recorder: Recorder, **place: Any) -> None:
        self._config = config
        self._recorder = recorder
        self._place = place
        self._calls = 0
        self._start_ns = 0

    @property
    def pending(self) -> bool:
        """Whether iterations are still to be recorded."""
        return self._config is not None and self._calls < self._config.warmup + self._config.iterations

    @contextmanager
    def iteration(self, iteration: int) -> Iterator[None]:
        """Around the work of one `train_batch`."""
        config = self._config
        if config is not None and self._calls == config.warmup:
            self._recorder.start()
            self._start_ns = self._recorder.now_ns()
        with self._recorder.span(TRAIN_BATCH, iteration=iteration):
            yield
        self._calls += 1
        if config is not None and self._calls == config.warmup + config.iterations:
            self.close()

    def close(self) -> None:
        """Write what was recorded, if there is something. A full disk is no reason to lose the training."""
        if self._config is None or not self._recorder.recording:
            return
        end_ns = self._recorder.now_ns()
        trace = StageTrace(**self._place, window_ns=(self._start_ns, end_ns), spans=tuple(self._recorder.stop()))
        path = Path(self._config.directory) / chrome.file_name(trace.rank)
        try:
            chrome.write(path, [trace])
        except OSError as error:
            logger.warning("the trace could not be written to %s: %s", path, error)
            return
        logger.info("trace written to %s; see: python -m avgpipe_ds.report %s", path, self._config.directory)


def prepare_directory(config: TraceConfig | None) -> None:
    """Make the trace directory, so that a wrong one is found before the training.

    Raises:
        ConfigError: it can't be made or written to.

    """
    if config is None:
        return
    directory = Path(config.directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ConfigError(f"avgpipe.trace: can't write to {directory}: {error}; name a folder that can be written to") from error
