"""Texts before tokenising, as every loader returns them."""

from collections.abc import Sequence
from dataclasses import dataclass

from common.errors import RecipeError
from common.splits import Split

__all__ = ["ClassificationCorpus", "LabelledTexts", "LanguageCorpus"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledTexts:
    """Texts with one class id each."""

    texts: Sequence[str]
    labels: Sequence[int]

    def rows(self, rows: Sequence[int]) -> "LabelledTexts":
        """Return the given rows, in the given order."""
        return LabelledTexts(texts=[self.texts[row] for row in rows], labels=[self.labels[row] for row in rows])


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassificationCorpus:
    """A training and a validation part, and the name of every class id."""

    train: LabelledTexts
    validation: LabelledTexts
    label_names: Sequence[str]

    def __post_init__(self) -> None:
        if not self.train.texts:
            raise RecipeError("The training data has no rows.")
        for part, texts in (("training", self.train), ("validation", self.validation)):
            for row, label in enumerate(texts.labels):
                if not 0 <= label < len(self.label_names):
                    raise RecipeError(
                        f"Row {row} of the {part} data has label {label}, outside 0 .. {len(self.label_names) - 1}"
                        " (-1 usually marks a row without a label; choose another split or remove those rows)."
                    )

    @classmethod
    def divide(cls, texts: LabelledTexts, split: Split, label_names: Sequence[str]) -> "ClassificationCorpus":
        """Make the two parts from one table."""
        train, validation = split
        return cls(train=texts.rows(train), validation=texts.rows(validation), label_names=label_names)


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageCorpus:
    """Documents to model; `validation` is None where the last part of the training text is to be held out."""

    train: Sequence[str]
    validation: Sequence[str] | None

    def __post_init__(self) -> None:
        if not any(self.train):
            raise RecipeError("The training data has no text.")
