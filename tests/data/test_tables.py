import json

import datasets
import pytest

from avgpipe_ds.data import load, tokenise
from avgpipe_ds.data.columns import column_values
from avgpipe_ds.errors import DataError

CSV = "text,label\n" + "".join(f"text {n},{'good' if n % 2 else 'bad'}\n" for n in range(10))


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_csv(tmp_path):
    tables = load(write(tmp_path / "a.csv", CSV))
    assert tables.validation is None
    assert tables.train[3] == {"text": "text 3", "label": "good"}


def test_tsv(tmp_path):
    file = write(tmp_path / "a.tsv", "id\tphrase\n" + "".join(f"{n}\tp{n}\n" for n in range(9)))
    assert column_values(load(str(file)).train, "phrase") == [f"p{n}" for n in range(9)]


@pytest.mark.parametrize("ending", ["jsonl", "json"])
def test_json(tmp_path, ending):
    rows = [{"sentence": f"s{n}", "category": n % 2} for n in range(6)]
    text = "\n".join(map(json.dumps, rows)) if ending == "jsonl" else json.dumps(rows)
    assert load(write(tmp_path / f"a.{ending}", text)).train.to_list() == rows


def test_parquet(tmp_path):
    datasets.Dataset.from_dict({"text": ["a", "b"]}).to_parquet(tmp_path / "a.parquet")
    assert column_values(load(tmp_path / "a.parquet").train, "text") == ["a", "b"]


def test_folder_with_its_own_validation_part(tmp_path):
    write(tmp_path / "d" / "train.csv", CSV)
    write(tmp_path / "d" / "validation.csv", "text,label\nx,good\ny,bad\n")
    tables = load(tmp_path / "d")
    assert (len(tables.train), len(tables.validation)) == (10, 2)


def test_text_files_are_documents_or_lines(tmp_path):
    for name in "ba":
        write(tmp_path / "d" / f"{name}.txt", f"{name} first\n\n{name} second\n")
    assert column_values(load(tmp_path / "d").train, "text") == ["a first\n\na second\n", "b first\n\nb second\n"]
    assert column_values(load(tmp_path / "d" / "a.txt").train, "text") == ["a first\n\na second\n"]
    assert column_values(load(tmp_path / "d" / "a.txt", sample_by="line").train, "text") == ["a first", "", "a second"]


def test_text_files_may_be_parts(tmp_path):
    for name in ("train", "validation", "readme"):
        write(tmp_path / "d" / f"{name}.txt", name)
    tables = load(tmp_path / "d")
    assert (tables.train["text"][:], tables.validation["text"][:]) == (["train"], ["validation"])


def test_in_memory():
    table = datasets.Dataset.from_dict({"text": ["a"]})
    assert load(table).train is table
    other = datasets.Dataset.from_dict({"text": ["b"]})
    tables = load(datasets.DatasetDict({"test": other, "train": table}))
    assert tables.train is table and tables.validation is other
    assert load({"anything": table}).validation is None


def test_hub_names_reach_the_library(monkeypatch):
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **_: asked.append(args) or {"train": ["row"]})
    assert load("glue", subset="sst2").train == ["row"]
    assert asked == [("glue", "sst2")]


@pytest.mark.parametrize(
    ("content", "message"), [("text,label\n", "has no rows"), ("", "the file is empty"), ("  \n", "the file is empty")]
)
def test_nothing_in_it(tmp_path, content, message):
    with pytest.raises(DataError, match=message):
        load(write(tmp_path / "a.csv", content))


def test_an_empty_part_is_named():
    table = datasets.Dataset.from_dict({"text": ["a"]})
    with pytest.raises(DataError, match="The validation data has no rows"):
        load({"train": table, "validation": table.select([])})
    with pytest.raises(DataError, match="has no parts"):
        load({})


@pytest.mark.parametrize("name", ["missing.csv", "./missing", "/missing/data", "~/missing.parquet"])
def test_missing(name):
    with pytest.raises(DataError, match="there is no such file or folder"):
        load(name)


def test_unknown_ending(tmp_path):
    with pytest.raises(DataError, match=r"Known endings: \.csv"):
        load(write(tmp_path / "a.xlsx", "x"))


def test_broken_json_names_the_file(tmp_path):
    with pytest.raises(DataError, match=r"a\.jsonl: could not be loaded"):
        load(write(tmp_path / "a.jsonl", "{nope"))


def test_what_is_streamed_has_no_length():
    with pytest.raises(DataError, match="not from a IterableDataset.*without streaming=True"):
        load(datasets.Dataset.from_dict({"text": ["a"]}).to_iterable_dataset())


def test_a_misspelt_name_is_suggested(monkeypatch):
    def unreachable(*args, **kwargs):
        raise ConnectionError("no hub here")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(DataError, match=r"Did you mean 'bbc-news'\?.*no hub here"):
        load("bbc-new", known=["bbc-news"])


def test_progress_bars_are_as_before(tmp_path):
    datasets.enable_progress_bars()
    load(write(tmp_path / "a.csv", CSV))
    assert datasets.is_progress_bar_enabled()


def test_mixed_labels_in_a_file(tmp_path, byte_tokenizer):
    """Which of the two it is depends on the version of datasets; both name the row."""
    file = write(tmp_path / "a.jsonl", '{"text": "a", "label": 1}\n{"text": "b", "label": 0}\n{"text": "c", "label": "x"}\n')
    with pytest.raises(DataError, match="one type, but row 2 of the training data holds 'x', a str|could not be loaded"):
        tokenise(load(file), byte_tokenizer("pad_token"), "sequence-classification")
