"""Elastic averaging of N pipelines over the same accelerators, on DeepSpeed (AvgPipe, PPoPP 2023, doi 10.1145/3572848.3577484).

Public names are imported on first use, so that the pure parts (schedules, simulator, averaging rules) work without starting
DeepSpeed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from avgpipe_ds.config import AvgPipeConfig
    from avgpipe_ds.deepspeed_compat import PartitionedModule as PipelineModule
    from avgpipe_ds.engine import AvgPipeEngine
    from avgpipe_ds.errors import AvgPipeError, ConfigError, DataError, DataExhausted
    from avgpipe_ds.initialization import init_distributed, initialize, partition_of

__version__ = "0.1.0"

__all__ = [
    "AvgPipeConfig",
    "AvgPipeEngine",
    "AvgPipeError",
    "ConfigError",
    "DataError",
    "DataExhausted",
    "PipelineModule",
    "init_distributed",
    "initialize",
    "partition_of",
]

_HOMES = {
    "AvgPipeConfig": "config",
    "AvgPipeEngine": "engine",
    "AvgPipeError": "errors",
    "ConfigError": "errors",
    "DataError": "errors",
    "DataExhausted": "errors",
    "init_distributed": "initialization",
    "initialize": "initialization",
    "partition_of": "initialization",
}


def __getattr__(name: str) -> Any:
    import importlib

    if name == "PipelineModule":
        return importlib.import_module(f"{__name__}.deepspeed_compat").PartitionedModule
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
