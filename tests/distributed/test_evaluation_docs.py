"""The examples of docs/evaluation.md run, one after another, as they stand there."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.world import World

DOCUMENT = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text()


def run_examples(examples: list[str]) -> tuple[list[str], dict[str, float], list[list[int]]]:
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()) as said:
        for example in examples:
            exec(compile(example, "docs/evaluation.md", "exec"), names)  # noqa: S102
    names["engine"].close()
    lines = [line for line in said.getvalue().splitlines() if line.startswith(("loss", "pipeline"))]
    return lines, names["scores"], [labels.tolist() for labels in names["found"]]


@pytest.mark.timeout(180)
def test_examples(worlds: dict[int, World]) -> None:
    examples = re.findall(r"```python\n(.*?)```", DOCUMENT, flags=re.DOTALL)
    assert len(examples) == 5
    (said, scores, none_here), (other, others_scores, found) = worlds[2].run(run_examples, examples)
    assert said == other and scores == others_scores
    number = r"\d\.\d{3}"
    patterns = [f"{start}loss {number}, accuracy {number}" for start in ("", "", "pipeline 0: ", "pipeline 1: ")]
    assert len(said) == 4 and all(map(re.fullmatch, patterns, said)), said
    assert none_here == [] and found == [[0, 0, 2, 3, 4]]  # in the order of the samples, though the longest came first
