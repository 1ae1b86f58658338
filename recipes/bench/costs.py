"""What the parts of the engine cost: time around the computation, and memory by kind."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch.distributed as dist

from avgpipe_ds import deepspeed_compat as compat
from avgpipe_ds.averaging.rules import AveragingRule
from avgpipe_ds.execution.executor import Executor
from avgpipe_ds.execution.mailbox import Mailbox
from avgpipe_ds.execution.pipeline import Pipeline
from avgpipe_ds.memory.breakdown import Breakdown
from avgpipe_ds.memory.engine_state import measured_state
from avgpipe_ds.memory.saved_tensors import SavedTensors
from avgpipe_ds.tracing.recorder import Recorder

__all__ = ["Stopwatch", "memory_of", "saved_bytes", "tracing_share", "tracing_slowdown"]

_COMPUTATION = ("forward", "backward_from_loss", "backward_from_gradients", "local_squared_norm", "optimizer_step")
_AVERAGING = {"before_step": "pull", "after_step": "pull", "finish_iteration": "reference"}


@dataclass
class Stopwatch:
    """Seconds and calls by part, while `running`.

    The executor's own time is what is left of `run` after computation, clipping norm, optimizer, waiting and sending: choosing,
    taking messages, data, random states, hooks, memory that is given back. As wall time it holds what other threads and processes
    take of the same core meanwhile, such as those that receive; as processor time of the main thread it does not. Sending grows
    with the message, whose bytes gloo copies, so it is counted by itself.
    """

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    cpu_seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    calls: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    @contextmanager
    def running(self) -> Iterator[None]:
        """Time everything inside the block."""
        targets: list[tuple[Any, str, str]] = [(compat, name, "computation") for name in _COMPUTATION]
        targets += [(AveragingRule, name, part) for name, part in _AVERAGING.items()]
        targets += [(Executor, "run", "run"), (Mailbox, "wait", "waiting"), (Mailbox, "send", "sending")]
        patches: list[Any] = [
            mock.patch.object(owner, name, self.timed(getattr(owner, name), part)) for owner, name, part in targets
        ]
        counted = {kind: self._counted(handler) for kind, handler in Pipeline._INSTRUCTION_MAP.items()}
        patches.append(mock.patch.object(Pipeline, "_INSTRUCTION_MAP", counted))
        for patch in patches:
            patch.start()
        try:
            yield
        finally:
            for patch in patches:
                patch.stop()

    @property
    def executor_ms(self) -> float:
        """Milliseconds of the executor's own wall time for each instruction."""
        return self._own_ms(self.seconds)

    @property
    def executor_cpu_ms(self) -> float:
        """Milliseconds of the executor's own processor time for each instruction."""
        return self._own_ms(self.cpu_seconds)

    @property
    def sending_cpu_ms(self) -> float:
        """Milliseconds of processor time to send a message."""
        return 1e3 * self.cpu_seconds["sending"] / max(1, self.calls["sending"])

    @property
    def averaging_share(self) -> float:
        """Part of the running time that pulls the parallel models, inside the optimizer steps, and updates the reference."""
        return (self.seconds["pull"] + self.seconds["reference"]) / max(1e-9, self.seconds["run"])

    def _own_ms(self, seconds: dict[str, float]) -> float:
        own = seconds["run"] - sum(seconds[part] for part in ("computation", "reference", "waiting", "sending"))
        return 1e3 * own / max(1, self.calls["instruction"])

    def timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        """The same function; its seconds and calls count for `part`."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            start, cpu_start = time.perf_counter(), time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[part] += time.perf_counter() - start
                self.cpu_seconds[part] += time.thread_time() - cpu_start
                self.calls[part] += 1

        return timed

    def _counted(self, handler: Callable[..., None]) -> Callable[..., None]:
        def counted(*args: Any, **kwargs: Any) -> None:
            self.calls["instruction"] += 1
            handler(*args, **kwargs)

        return counted


def tracing_share(engine: Any, data: Iterator[Any], *, iterations: int) -> list[float]:
    """What part of each iteration its main thread spends in the recorder of timelines, which would do nothing there else.

    Timed in place, as training leaves the caches, and with the clock's own cost, so it is rather too much than too little.
    """
    recorder, watch, shares = engine._stage.recorder, Stopwatch(), []

    @contextmanager
    def span(*args: Any, **kwargs: Any) -> Iterator[None]:
        block = watch.timed(Recorder.span, "recorder")(recorder, *args, **kwargs)
        watch.timed(block.__enter__, "recorder")()
        try:
            yield
        finally:
            watch.timed(block.__exit__, "recorder")(None, None, None)

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(recorder, "span", span))
        for name in ("nothing_to_do", "can_go_on"):
            patches.enter_context(mock.patch.object(recorder, name, watch.timed(getattr(recorder, name), "recorder")))
        recorder.start()
        for _ in range(iterations):
            before_s, start = watch.seconds["recorder"], time.perf_counter()
            engine.train_batch(data)
            shares.append((watch.seconds["recorder"] - before_s) / (time.perf_counter() - start))
        recorder.stop()
    return shares


def tracing_slowdown(engine: Any, data: Iterator[Any], *, pairs: int) -> list[float]:
    """What part of the time of an iteration recording a timeline adds, for pairs of neighbouring iterations with and without.

    Neighbours differ by more than that for other reasons, so only the median of many pairs says something.
    """
    recorder, shares = engine._stage.recorder, []
    for pair in range(pairs):
        seconds = {}
        for traced in (pair % 2 == 0, pair % 2 == 1):
            if traced:
                recorder.start()
            dist.barrier()
            start = time.perf_counter()
            engine.train_batch(data)
            dist.barrier()
            seconds[traced] = time.perf_counter() - start
            recorder.stop()
        shares.append(seconds[True] / seconds[False] - 1)
    return shares


def memory_of(engine: Any) -> Breakdown:
    """Bytes on this stage by kind, all pipelines together, activations apart; gradients as they are at an optimizer step."""
    return measured_state([pipeline.engine for pipeline in engine.pipelines], engine.reference)


def saved_bytes(engine: Any, inputs: Any) -> int:
    """Bytes that autograd keeps of one micro-batch on this stage, beside the weights."""
    with SavedTensors(engine.module.parameters()) as saved:
        outputs = compat.forward(engine, inputs)
        kept = saved.live_bytes
    del outputs
    return kept
