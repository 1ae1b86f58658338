"""From the `--dataset` argument to texts."""

from typing import TYPE_CHECKING

from common import packaged_corpora
from common.columns import encode_labels, label_column, non_empty_texts, text_column
from common.corpus import ClassificationCorpus, LabelledTexts, LanguageCorpus
from common.errors import RecipeError
from common.options import DataOptions
from common.splits import hold_out
from common.tables import load_tables

if TYPE_CHECKING:
    from datasets import Dataset

__all__ = ["load_classification", "load_language"]

_PACKAGED = (*packaged_corpora.CLASSIFICATION, *packaged_corpora.LANGUAGE)


def load_classification(options: DataOptions) -> ClassificationCorpus:
    """Load labelled texts: a packaged data set by name, else a local file or folder, else a data set of the hub."""
    if options.dataset in packaged_corpora.CLASSIFICATION:
        return packaged_corpora.CLASSIFICATION[options.dataset](options.validation_fraction)
    if options.dataset in packaged_corpora.LANGUAGE:
        raise _without_labels(options.dataset)
    tables = load_tables(options.dataset, subset=options.subset, packaged=_PACKAGED)
    column = label_column(tables.train.column_names, options.label_column)
    declared = getattr(tables.train.features[column], "names", None)
    num_train = len(tables.train)
    values = list(tables.train[column])
    if tables.validation is not None:
        # Encoded together, so that a class has the same id in both parts.
        values += list(tables.validation[label_column(tables.validation.column_names, column)])
    labels, names = encode_labels(values, declared, column=column)
    train = LabelledTexts(texts=_texts(tables.train, options), labels=labels[:num_train])
    if tables.validation is None:
        return ClassificationCorpus.divide(train, hold_out(train.labels, options.validation_fraction), names)
    validation = LabelledTexts(texts=_texts(tables.validation, options), labels=labels[num_train:])
    unseen = sorted(set(validation.labels) - set(train.labels))
    if declared is None and unseen:
        raise RecipeError(f"The validation data has classes that the training data lacks: {[names[label] for label in unseen]}.")
    return ClassificationCorpus(train=train, validation=validation, label_names=names)


def load_language(options: DataOptions) -> LanguageCorpus:
    """Load running text: a packaged text by name, else a local file or folder, else a data set of the hub."""
    if options.dataset in packaged_corpora.LANGUAGE:
        return packaged_corpora.LANGUAGE[options.dataset]()
    if options.dataset in packaged_corpora.CLASSIFICATION:
        corpus = packaged_corpora.CLASSIFICATION[options.dataset](options.validation_fraction)
        return LanguageCorpus(train=corpus.train.texts, validation=corpus.validation.texts)
    tables = load_tables(options.dataset, subset=options.subset, packaged=_PACKAGED)
    validation = None if tables.validation is None else _texts(tables.validation, options, allow_empty=True)
    return LanguageCorpus(train=_texts(tables.train, options, allow_empty=True), validation=validation)


def _texts(table: "Dataset", options: DataOptions, *, allow_empty: bool = False) -> list[str]:
    column = text_column(table.column_names, options.text_column)
    values = list(table[column])
    if allow_empty:  # running text may have empty rows between paragraphs
        values = [value for value in values if value]
    return non_empty_texts(values, column=column) if not allow_empty else [str(value) for value in values]


def _without_labels(dataset: str) -> RecipeError:
    known = ", ".join(packaged_corpora.CLASSIFICATION)
    return RecipeError(f"--dataset {dataset}: is running text without labels. Packaged data sets with labels: {known}.")
