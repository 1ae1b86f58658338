"""docs/trainer.md: its commands run as they stand there, and what it shows of the recipe is in the recipe."""

from __future__ import annotations

import difflib
import json
import re
import shlex
from pathlib import Path

import pytest
from transformers import pipeline

from tests.distributed import trainer_cases as cases
from tests.distributed.test_tune import ROOT, port, start

DOCUMENT = (ROOT / "docs" / "trainer.md").read_text(encoding="utf-8")
RECIPE = ROOT / "recipes" / "trainer_classify.py"
COMMANDS = re.findall(r"```sh\n(.*?)\n```", DOCUMENT, flags=re.DOTALL)

pytestmark = pytest.mark.timeout(300)


def test_the_difference_is_that_of_the_recipe() -> None:
    (shown,) = re.findall(r"```diff\n(.*?)```", DOCUMENT, flags=re.DOTALL)
    kept = [line[1:] for line in shown.splitlines() if line[:1] in ("+", " ") and line[1:].strip()]
    recipe = [line for line in RECIPE.read_text(encoding="utf-8").splitlines() if line.strip()]
    missing = [line[2:] for line in difflib.ndiff(recipe, kept) if line.startswith("+ ")]
    assert not missing, "these lines are not in the recipe, or in another order"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the commands find a model of that name, data and the recipe."""
    cases.make_model(tmp_path / "bert-base-uncased")
    cases.make_csv(tmp_path / "reviews.csv")
    (tmp_path / "recipes").symlink_to(RECIPE.parent)
    return tmp_path


def test_the_commands(folder: Path) -> None:
    first, longer = (shlex.split(command) for command in COMMANDS)
    for command, epochs in ((first, 2), (longer, 3)):
        done = start([command[0], "--master_port", port(), *command[1:]], folder)
        assert done.returncode == 0, done.stdout + done.stderr
        state = json.loads((folder / "out" / "trainer_state.json").read_text())
        assert state["global_step"] == 2 * epochs and state["epoch"] == epochs  # 45 samples, 2 pipelines of 16
        evaluated = [line["step"] for line in state["log_history"] if "eval_accuracy" in line]
        assert evaluated == [2 * (epoch + 1) for epoch in range(epochs)], "each once: the first two were not trained again"
    assert {path.name for path in (folder / "out").glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-4", "checkpoint-6"}
    (said,) = pipeline("text-classification", model=str(folder / "out"), device="cpu")("the film was great")
    assert said["label"] in cases.LABEL_NAMES
