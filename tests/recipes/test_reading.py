import json

import pytest
from common.errors import RecipeError
from common.load import load_classification, load_language
from common.options import DataOptions


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def options(dataset, **more):
    return DataOptions(dataset=str(dataset), **more)


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


CSV = "text,label\n" + "".join(f"text {n},{'good' if n % 2 else 'bad'}\n" for n in range(10))


def test_csv(tmp_path):
    corpus = load_classification(options(write(tmp_path / "a.csv", CSV)))
    assert list(corpus.label_names) == ["bad", "good"]
    assert len(corpus.train.texts) == 8 and len(corpus.validation.texts) == 2
    assert sorted(corpus.validation.labels) == [0, 1]  # stratified
    texts = [*corpus.train.texts, *corpus.validation.texts]
    labels = [*corpus.train.labels, *corpus.validation.labels]
    assert all(label == int(text.split()[1]) % 2 for text, label in zip(texts, labels, strict=True))


def test_tsv_and_other_columns(tmp_path):
    file = write(tmp_path / "a.tsv", "id\tphrase\tmood\n" + "".join(f"{n}\tp{n}\t{n % 3}\n" for n in range(9)))
    corpus = load_classification(options(file, text_column="phrase", label_column="mood"))
    assert list(corpus.label_names) == ["0", "1", "2"]


@pytest.mark.parametrize("ending", ["jsonl", "json"])
def test_json(tmp_path, ending):
    rows = [{"sentence": f"s{n}", "category": n % 2} for n in range(6)]
    text = "\n".join(map(json.dumps, rows)) if ending == "jsonl" else json.dumps(rows)
    corpus = load_classification(options(write(tmp_path / f"a.{ending}", text)))
    assert len(corpus.train.texts) + len(corpus.validation.texts) == 6


def test_folder_with_its_own_validation_part(tmp_path):
    write(tmp_path / "d" / "train.csv", CSV)
    write(tmp_path / "d" / "validation.csv", "text,label\nx,good\ny,bad\n")
    corpus = load_classification(options(tmp_path / "d"))
    assert len(corpus.train.texts) == 10
    assert list(corpus.validation.labels) == [1, 0]


def test_validation_class_that_training_lacks(tmp_path):
    write(tmp_path / "d" / "train.csv", CSV)
    write(tmp_path / "d" / "validation.csv", "text,label\nx,ugly\n")
    with pytest.raises(RecipeError, match="lacks.*'ugly'"):
        load_classification(options(tmp_path / "d"))


def test_text_files_are_documents(tmp_path):
    for name in "ba":
        write(tmp_path / "d" / f"{name}.txt", f"{name} first\n\n{name} second\n")
    assert load_language(options(tmp_path / "d")).train == ["a first\n\na second\n", "b first\n\nb second\n"]
    assert load_language(options(tmp_path / "d" / "a.txt")).train == ["a first\n\na second\n"]


@pytest.mark.parametrize(
    ("content", "more", "message"),
    [
        (CSV, {"text_column": "txt"}, r"Unknown column \(--text-column\) 'txt'. Did you mean 'text'\?"),
        (CSV, {"label_column": "labell"}, "Did you mean 'label'"),
        ("a,b\n1,2\n3,4\n", {}, r"--label-column is needed: none of the columns \['a', 'b'\]"),
        ("text,label\nx,1\n,0\n", {}, "'text' must hold text in every row, but row 1 holds None"),
        ("text,label\nx,1\ny,\n", {}, "'label' must hold a class in every row"),
        ("text,label\nx,0.5\ny,1.5\n", {}, "row 0 holds 0.5"),
        ("text,label\nx,1\ny,1\n", {}, r"holds 1 class\(es\); classification needs at least 2"),
        ("text,label\n", {}, "has no rows"),
        ("", {}, "the file is empty"),
        ("  \n", {}, "the file is empty"),
    ],
)
def test_bad_csv(tmp_path, content, more, message):
    with pytest.raises(RecipeError, match=message):
        load_classification(options(write(tmp_path / "a.csv", content), **more))


@pytest.mark.parametrize("name", ["missing.csv", "./missing", "/missing/data"])
def test_missing(name):
    with pytest.raises(RecipeError, match="there is no such file or folder"):
        load_classification(options(name))


def test_unknown_ending(tmp_path):
    with pytest.raises(RecipeError, match=r"Known endings: \.csv"):
        load_classification(options(write(tmp_path / "a.xlsx", "x")))


def test_broken_json_names_the_file(tmp_path):
    with pytest.raises(RecipeError, match=r"a\.jsonl: could not be loaded"):
        load_classification(options(write(tmp_path / "a.jsonl", "{nope")))


def test_running_text_has_no_labels():
    with pytest.raises(RecipeError, match="without labels"):
        load_classification(options("python-stdlib"))


def test_declared_classes_out_of_range(tmp_path):
    from datasets import ClassLabel, Dataset, Features, Value

    features = Features({"text": Value("string"), "label": ClassLabel(names=["no", "yes"])})
    Dataset.from_dict({"text": ["a", "b", "c"], "label": [0, 1, -1]}, features=features).to_parquet(
        tmp_path / "d" / "train.parquet"
    )
    with pytest.raises(RecipeError, match=r"label -1, outside 0 \.\. 1"):
        load_classification(options(tmp_path / "d"))


def test_a_misspelt_packaged_name_is_suggested(monkeypatch):
    import datasets

    def unreachable(*args, **kwargs):
        raise ConnectionError("no hub here")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(RecipeError, match=r"Did you mean 'bbc-news'\?.*no hub here"):
        load_classification(options("bbc-new"))
