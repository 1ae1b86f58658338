"""Transformers' callbacks around a trainer: those that are always there, and their states in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from transformers import DefaultFlowCallback, PrinterCallback, ProgressCallback, TrainerCallback
from transformers.trainer_callback import CallbackHandler, ExportableState

from avgpipe_ds.engine import AvgPipeEngine

__all__ = ["Callback", "MonitorCallback", "callback_handler", "callback_states", "load_callback_states"]

Callback: TypeAlias = TrainerCallback | type[TrainerCallback]
"""One of transformers' callbacks, or its class."""


def callback_handler(
    engine: AvgPipeEngine, tokenizer: Any, callbacks: Sequence[Callback], *, disable_tqdm: bool
) -> CallbackHandler:
    """What tells the callbacks of events: the usual flow, the user's, DeepSpeed's monitors, and a bar or printed lines."""
    shown = PrinterCallback() if disable_tqdm else ProgressCallback()
    return CallbackHandler(
        [DefaultFlowCallback(), *callbacks, MonitorCallback(engine), shown],
        engine.module,
        tokenizer,
        engine.optimizer,
        engine.lr_scheduler,
    )


def callback_states(handler: CallbackHandler) -> dict[str, Any]:
    """Of the callbacks that have one, by their class."""
    return {type(one).__name__: one.state() for one in handler.callbacks if isinstance(one, ExportableState)}


def load_callback_states(handler: CallbackHandler, states: Mapping[str, Any]) -> None:
    """Give the callbacks what `callback_states` had of them; their arguments stay those of now."""
    for one in handler.callbacks:
        if isinstance(one, ExportableState):
            for name, value in states.get(type(one).__name__, {}).get("attributes", {}).items():
                setattr(one, name, value)


class MonitorCallback(TrainerCallback):  # type: ignore[misc]
    """Hands logs to DeepSpeed's monitors."""

    def __init__(self, engine: AvgPipeEngine) -> None:
        self._engine = engine

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **others: Any) -> None:
        """Write numbers, evaluations under "Eval/" and the rest under "Train/"."""
        engine = self._engine
        if engine.global_rank != 0 or not engine.monitor.enabled:
            return
        named = {
            f"Eval/{name.removeprefix('eval_')}" if name.startswith("eval_") else f"Train/{name}": value
            for name, value in (logs or {}).items()
            if isinstance(value, int | float)
        }
        engine.monitor.write_events([(name, value, engine.global_samples) for name, value in named.items()])
