"""From the `--dataset` argument to tables of rows."""

from avgpipe_ds.data import Tables, load
from common import packaged_corpora
from common.errors import RecipeError
from common.options import DataOptions

__all__ = ["load_labelled", "load_running_text"]

_PACKAGED = (*packaged_corpora.CLASSIFICATION, *packaged_corpora.LANGUAGE)


def load_labelled(options: DataOptions) -> Tables:
    """Load labelled texts: a packaged data set by name, else a local file or folder, else a data set of the hub.

    Raises:
        RecipeError: the package that carries the data set is missing, or it has no labels.
        DataError: there is no such data set, or it can't be read.

    """
    if options.dataset in packaged_corpora.CLASSIFICATION:
        return packaged_corpora.CLASSIFICATION[options.dataset](options.validation_fraction)
    if options.dataset in packaged_corpora.LANGUAGE:
        known = ", ".join(packaged_corpora.CLASSIFICATION)
        raise RecipeError(
            f"--dataset {options.dataset}: is running text without labels. Packaged data sets with labels: {known}."
        )
    return load(options.dataset, subset=options.subset, known=_PACKAGED)


def load_running_text(options: DataOptions) -> Tables:
    """Load running text: a packaged text by name, else a local file or folder, else a data set of the hub.

    Raises:
        RecipeError, DataError: as `load_labelled`.

    """
    if options.dataset in packaged_corpora.LANGUAGE:
        return packaged_corpora.LANGUAGE[options.dataset]()
    if options.dataset in packaged_corpora.CLASSIFICATION:
        return packaged_corpora.CLASSIFICATION[options.dataset](options.validation_fraction)
    return load(options.dataset, subset=options.subset, known=_PACKAGED)
