"""Tables of what `python -m avgpipe_ds.report` found."""

import json
from pathlib import Path

from pages.markdown import table

__all__ = ["bubbles"]

_NOTEWORTHY = 0.0005


def bubbles(files: list[Path]) -> str:
    """Shares of each stage's time; what takes next to none anywhere is left out."""
    columns, shares = [""], []
    for file in files:
        for stage in json.loads(file.read_text()):
            columns.append(f"{file.stem}, stage {stage['stage_id']}" if len(files) > 1 else f"stage {stage['stage_id']}")
            shares.append(stage["shares"])
    rows = [
        [category, *(f"{stage[category]:.1%}" for stage in shares)]
        for category in shares[0]
        if max(stage[category] for stage in shares) >= _NOTEWORTHY
    ]
    return table(columns, rows)
