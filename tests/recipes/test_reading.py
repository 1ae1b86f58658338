import datasets
import pytest
from common import packaged_corpora
from common.errors import RecipeError
from common.load import load_labelled, load_running_text
from common.narrator import Narrator
from common.options import RecipeDefaults, parse_options
from common.session import run_recipe
from common.tasks import classification_task, language_task
from transformers import AutoTokenizer

from avgpipe_ds.errors import DataError

CSV = "phrase,mood\n" + "".join(f"text {n},{'good' if n % 2 else 'bad'}\n" for n in range(10))


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setenv("AVGPIPE_DS_CACHE", str(tmp_path / "models"))


@pytest.fixture
def location():
    from common.models import model_location

    return model_location("gpt2-bytes")


def options(tmp_path, *arguments, labelled=True):
    config = tmp_path / "config.json"
    config.write_text("{}")
    defaults = RecipeDefaults(
        description="",
        model="gpt2-bytes",
        dataset="",
        deepspeed_config=str(config),
        max_length=8,
        validation_fraction=0.2,
        max_validation_samples=None,
        labelled=labelled,
    )
    return parse_options(defaults, arguments)


def write(path, text):
    path.write_text(text)
    return str(path)


def test_classification_from_a_file(tmp_path, location):
    file = write(tmp_path / "a.csv", CSV)
    recipe, data = options(tmp_path, "--dataset", file, "--text-column", "phrase", "--label-column", "mood")
    with Narrator(enabled=False) as narrator:
        task, classes, tokenizer = classification_task(location, recipe, data, narrator)
    assert classes == ["bad", "good"]
    assert tokenizer.pad_token == tokenizer.eos_token
    assert (len(task.train), len(task.validation)) == (8, 2)
    assert sorted(sample.labels for sample in task.validation) == [0, 1]  # stratified
    for sample in [*task.train, *task.validation]:
        assert sample.labels == int(tokenizer.decode(sample.input_ids).split()[1]) % 2
    assert task.classes


def test_running_text_from_a_file(tmp_path, location):
    file = write(tmp_path / "a.txt", "abcdefgh" * 10)
    recipe, data = options(tmp_path, "--dataset", file, labelled=False)
    with Narrator(enabled=False) as narrator:
        task, tokenizer = language_task(location, recipe, data, narrator)
    assert (len(task.train), len(task.validation)) == (8, 2)  # 80 letters, and an end of text that nothing follows
    assert tokenizer.decode(task.train[3].input_ids) == "abcdefgh"
    assert not task.classes


def test_too_little_text(tmp_path, location):
    recipe, data = options(tmp_path, "--dataset", write(tmp_path / "a.txt", "abc"), labelled=False)
    with pytest.raises(DataError, match="single sample"):
        language_task(location, recipe, data, Narrator(enabled=False))


def test_running_text_has_no_labels(tmp_path):
    with pytest.raises(RecipeError, match="without labels. Packaged data sets with labels: bbc-news"):
        load_labelled(options(tmp_path, "--dataset", "python-stdlib")[1])


def test_labelled_texts_are_running_text_too(tmp_path, monkeypatch):
    table = datasets.Dataset.from_dict({"text": ["a"], "label": [0]})
    monkeypatch.setattr(packaged_corpora, "CLASSIFICATION", {"bbc-news": lambda fraction: (fraction, table)})
    assert load_running_text(options(tmp_path, "--dataset", "bbc-news")[1]) == (0.2, table)


def test_a_misspelt_packaged_name_is_suggested(tmp_path, monkeypatch):
    def unreachable(*args, **kwargs):
        raise ConnectionError("no hub here")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(DataError, match=r"Did you mean 'bbc-news'\?.*no hub here"):
        load_labelled(options(tmp_path, "--dataset", "bbc-new")[1])


def test_an_error_of_the_data_is_one_line(tmp_path, capsys):
    def recipe(narrator):
        load_labelled(options(tmp_path, "--dataset", "missing.csv")[1])

    with pytest.raises(SystemExit, match="2"):
        run_recipe(recipe)
    assert capsys.readouterr().err == "[rank 0] error: missing.csv: there is no such file or folder.\n"


def test_packaged_model_has_its_tokenizer(location):
    assert AutoTokenizer.from_pretrained(location).pad_token is None
