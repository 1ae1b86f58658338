"""What a finished run leaves: one JSON line, written at once, so that an interrupted grid loses only the runs under way."""

import os
from collections.abc import Iterable
from pathlib import Path

from common.errors import RecipeError
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

__all__ = ["Conditions", "Point", "Record", "append", "ensure_writable", "read_all"]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Conditions(_Frozen):
    """What all runs of a comparison have in common."""

    model: str = Field(description="as --model of the other recipes takes it")
    dataset: str = Field(description="as --dataset of the other recipes takes it")
    max_length: int = Field(ge=2, description="tokens of the longest sample")
    batch_size: int = Field(ge=1, description="B, samples")
    max_samples: int = Field(ge=1, description="samples to train on")
    eval_every: int = Field(ge=1, description="samples between two validations")
    warmup_samples: int = Field(ge=0, description="samples over which the learning rate rises")
    validation_samples: int = Field(ge=1, description="samples to validate on")


class Point(_Frozen):
    """One validation of the model that would be used.

    Attributes:
        samples: trained until then.
        accuracy, loss: of the validation.
        training_loss: mean over the iterations since the validation before.

    """

    samples: int
    accuracy: float
    loss: float
    training_loss: float


class Record(_Frozen):
    """One run.

    Attributes:
        stopped_at: the target that it was allowed to stop at; None where it used the whole budget in any case.
        curve: all validations; of a run that diverged, those before.
        diverged: whether it ended because the loss was no number any more.
        run_s: seconds that it took, validations included, on whatever machine that was.

    """

    setting: str
    learning_rate: float
    seed: int
    conditions: Conditions
    num_stages: int
    num_micro_batches: int
    stopped_at: float | None
    curve: tuple[Point, ...]
    diverged: bool = False
    run_s: float
    versions: dict[str, str]

    @model_validator(mode="after")
    def _has_a_curve(self) -> "Record":
        if not self.curve and not self.diverged:
            raise ValueError("a run that did not diverge has at least one validation")
        return self

    @property
    def key(self) -> tuple[str, float, int]:
        """What tells it from the other runs of the comparison."""
        return self.setting, self.learning_rate, self.seed


def ensure_writable(file: Path, *, option: str) -> None:
    """Make sure that `file` can be written before anything is spent on what is to be kept there; it is not changed.

    Raises:
        RecipeError: it can't.

    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.open("a").close()
    except OSError as error:
        raise RecipeError(f"{option} {file}: can't write there: {error}.") from error


def append(file: Path, record: Record) -> None:
    """Add a line to `file`; one write, so that several jobs may share it."""
    with file.open("ab") as stream:
        line = record.model_dump_json() + "\n"
        stream.write((line if _ends_a_line(file) else "\n" + line).encode())


def _ends_a_line(file: Path) -> bool:
    """Whether what is added begins a line of its own; an editor, or a job that was killed, may have left an end off."""
    with file.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, size - 1))
        return stream.read() in (b"", b"\n")


def _read(file: Path) -> list[Record]:
    """Return the runs in `file`, none where it does not exist.

    Raises:
        RecipeError: a line is no run.

    """
    if not file.exists():
        return []
    records = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            records.append(Record.model_validate_json(line))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise RecipeError(
                f"{file}, line {number}, is not a run of this recipe: {where} {first['msg']}. Remove that line; its run will be"
                " trained again."
            ) from error
    return records


def read_all(files: Iterable[Path], *, conditions: Conditions | None = None) -> list[Record]:
    """Return the runs of all `files`, each once. All have to be of `conditions`, or, without them, of the first one's.

    Raises:
        RecipeError: a line is no run, or a run can't be compared with the others.

    """
    records: dict[tuple[str, float, int], Record] = {}
    for file in files:
        for record in _read(file):
            conditions = conditions or record.conditions
            expected, found = conditions.model_dump(), record.conditions.model_dump()
            different = [f"{name} {found[name]!r}, not {value!r}" for name, value in expected.items() if found[name] != value]
            if different:
                raise RecipeError(f"{file} has a run of other conditions: {'; '.join(different)}. Use another file for these.")
            records[record.key] = record
    return list(records.values())
