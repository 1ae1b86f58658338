"""A check before training: one micro-batch through the real stages, and what would hang or break later, by the layer's name."""

from __future__ import annotations

from avgpipe_ds.preflight.check import preflight
from avgpipe_ds.preflight.report import Comparison, LayerRow, PreflightError, Problem, Report, Value

__all__ = ["Comparison", "LayerRow", "PreflightError", "Problem", "Report", "Value", "preflight"]
