import multiprocessing

import datasets
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, List, Value

from avgpipe_ds.data import (
    BatchShape,
    CausalLM,
    Collate,
    MaskedLM,
    SequenceClassification,
    Tables,
    TokenClassification,
    TrainingBatches,
    tokenise,
)
from avgpipe_ds.data.samples import lengths_of, num_targets_of
from avgpipe_ds.errors import DataError

END, PAD = 256, 257


def codes(text):
    return list(text.encode())


def texts(*rows, **columns):
    return Dataset.from_dict({"text": rows, **columns})


@pytest.fixture
def letters(byte_tokenizer):
    return byte_tokenizer("eos_token", "pad_token")


@pytest.fixture
def bert(byte_tokenizer):
    return byte_tokenizer("cls_token", "sep_token", "mask_token", "pad_token", wrap=True)


CLS, SEP, MASK = 256, 257, 258


class TestSequenceClassification:
    def test_classes_are_the_sorted_labels(self, letters):
        tokens = tokenise(texts("abc", "de", "f", label=["no", "yes", "no"]), letters, "sequence-classification")
        assert tokens.label_names == ("no", "yes")
        assert list(tokens.train) == [(codes("abc"), 0, 1, None), (codes("de"), 1, 1, None), (codes("f"), 0, 1, None)]
        assert tokens.train.lengths == lengths_of(list(tokens.train)) == [3, 2, 1]
        assert tokens.train.num_targets == num_targets_of(list(tokens.train)) == [1, 1, 1]
        assert list(tokens.train[1:]) == list(tokens.train)[1:]

    def test_parts_share_their_classes(self, letters):
        tables = Tables(train=texts("a", "b", label=[5, 3]), validation=texts("c", label=[5]))
        tokens = tokenise(tables, letters, "sequence-classification")
        assert tokens.label_names == ("3", "5")
        assert tokens.validation[0].labels == 1

    def test_declared_classes(self, letters):
        features = Features({"text": Value("string"), "label": ClassLabel(names=["bad", "good", "never"])})
        table = Dataset.from_dict({"text": ["a"], "label": [1]}, features=features)
        tokens = tokenise(table, letters, "sequence-classification")
        assert (tokens.label_names, tokens.train[0].labels) == (("bad", "good", "never"), 1)
        with pytest.raises(DataError, match=r"row 1 of the training data has label -1, outside 0 \.\. 2"):
            table = Dataset.from_dict({"text": ["a", "b"], "label": [0, -1]}, features=features)
            tokenise(table, letters, "sequence-classification")

    def test_given_classes(self, letters):
        task = SequenceClassification(label_names=["z", "a"])
        assert [sample.labels for sample in tokenise(texts("x", "y", label=["a", "z"]), letters, task).train] == [1, 0]
        assert [sample.labels for sample in tokenise(texts("x", "y", label=[1, 0]), letters, task).train] == [1, 0]
        with pytest.raises(DataError, match="row 1 of the training data has label 'b', which is none of the classes 'z', 'a'"):
            tokenise(texts("x", "y", label=["a", "b"]), letters, task)
        with pytest.raises(DataError, match=r"row 0 of the training data has label 2, outside 0 \.\. 1"):
            tokenise(texts("x", label=[2]), letters, task)

    def test_pairs_with_token_types(self, byte_tokenizer):
        bert = byte_tokenizer("cls_token", "sep_token", "pad_token", wrap=True)
        bert.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
        table = Dataset.from_dict({"premise": ["ab", "x"], "hypothesis": ["c", "y"], "label": [0, 1]})
        tokens = tokenise(table, bert, SequenceClassification(text="premise", pair="hypothesis"))
        ids = [CLS, *codes("ab"), SEP, *codes("c"), SEP]
        assert tokens.train[0] == (ids, 0, 1, [0, 0, 0, 0, 1, 1])
        roberta = byte_tokenizer("cls_token", "sep_token", "pad_token", wrap=True)
        roberta.model_input_names = ["input_ids", "attention_mask"]
        assert tokenise(table, roberta, SequenceClassification(text="premise", pair="hypothesis")).train[0] == (ids, 0, 1, None)

    @pytest.mark.parametrize(
        ("columns", "task", "message"),
        [
            (
                {"label": [1, 0]},
                {"text": "txt"},
                r"text='txt': there is no such column. Did you mean 'text'\? Columns: 'text', 'label'",
            ),
            ({"label": [1, 0]}, {"label": "labell"}, "label='labell': there is no such column. Did you mean 'label'"),
            ({"colour": [1, 0]}, {}, "label is needed: none of the columns 'text', 'colour' has a usual name"),
            ({"label": [1, None]}, {}, "'label' must hold a class in every row.*row 1 of the training data holds None"),
            ({"label": ["", "x"]}, {}, "row 0 of the training data holds ''"),
            ({"label": [0.5, 1.5]}, {}, "row 0 of the training data holds 0.5"),
            ({"label": [1, 1]}, {}, r"holds 1 class\(es\); classification needs at least 2"),
        ],
    )
    def test_wrong_columns(self, letters, columns, task, message):
        with pytest.raises(DataError, match=message):
            tokenise(texts("a", "b", **columns), letters, SequenceClassification(**task))

    def test_rows_without_text(self, letters):
        for empty in (None, "", " \n"):
            with pytest.raises(DataError, match="The training data, row 1: column 'text' must hold text in every row, but holds"):
                tokenise(texts("a", empty, label=[0, 1]), letters, "sequence-classification")

    def test_a_validation_class_that_training_lacks(self, letters):
        tables = Tables(train=texts("a", "b", label=["x", "y"]), validation=texts("c", label=["ugly"]))
        with pytest.raises(DataError, match="lacks.*'ugly'"):
            tokenise(tables, letters, "sequence-classification")

    def test_parts_with_different_columns_or_labels(self, letters):
        train = texts("a", "b", label=["x", "y"])
        with pytest.raises(DataError, match="there is no such column. Columns: 'text'"):
            tokenise(Tables(train=train, validation=texts("c")), letters, "sequence-classification")
        with pytest.raises(DataError, match="labels of different types in its parts: int, str"):
            tokenise(Tables(train=train, validation=texts("c", label=[1])), letters, "sequence-classification")
        with pytest.raises(DataError, match="column of the validation data='text': there is no such column"):
            other = Dataset.from_dict({"sentence": ["c"], "label": ["x"]})
            tokenise(Tables(train=train, validation=other), letters, "sequence-classification")

    def test_without_a_padding_token_it_says_what_to_set(self, byte_tokenizer):
        with pytest.raises(DataError, match="set tokenizer.pad_token = tokenizer.eos_token, and the model's config.pad_token_id"):
            tokenise(texts("a", label=[0]), byte_tokenizer("eos_token"), "sequence-classification")


class TestLengths:
    def test_too_long_is_an_error_with_the_row(self, letters):
        table = texts("ab", "abcd", label=[0, 1])
        with pytest.raises(DataError, match="The training data, row 1: 4 tokens, and max_length is 3. Pass truncate=True"):
            tokenise(table, letters, "sequence-classification", max_length=3)
        tokens = tokenise(table, letters, "sequence-classification", max_length=3, truncate=True)
        assert tokens.train[1].input_ids == codes("abc")

    def test_special_tokens_survive_truncation(self, bert):
        tokens = tokenise(texts("abcd", label=[0]), bert, SequenceClassification(label_names="xy"), max_length=4, truncate=True)
        assert tokens.train[0].input_ids == [CLS, *codes("ab"), SEP]

    def test_by_default_what_the_tokenizer_says(self, byte_tokenizer):
        table = texts("abcd", "ab")
        with pytest.raises(DataError, match="row 0: 5 tokens, and max_length is 4"):
            tokenise(table, byte_tokenizer("eos_token", model_max_length=4), "causal-lm")
        assert len(tokenise(table, byte_tokenizer("eos_token"), "causal-lm").train) == 2  # no limit is known

    def test_truncation_to_an_unknown_length(self, letters):
        with pytest.raises(DataError, match="Packing and truncation need max_length"):
            tokenise(texts("abcd"), letters, "causal-lm", truncate=True)

    def test_impossible_limit(self, letters):
        with pytest.raises(ValueError, match="max_length must be at least 2 tokens, got 1"):
            tokenise(texts("a"), letters, "causal-lm", max_length=1)


class TestTokenClassification:
    TABLE = {"tokens": [["Anna", "ate"], ["no"]], "ner_tags": [["PER", "O"], ["O"]]}

    def test_first_token_of_a_word_has_its_label(self, bert):
        tokens = tokenise(Dataset.from_dict(self.TABLE), bert, "token-classification")
        assert tokens.label_names == ("O", "PER")
        sample = tokens.train[0]
        assert sample.input_ids == [CLS, *codes("Anna"), *codes("ate"), SEP]
        assert sample.labels == [-100, 1, -100, -100, -100, 0, -100, -100, -100]
        assert sample.num_targets == 2

    def test_truncation_drops_labels_with_their_words(self, bert):
        sample = tokenise(Dataset.from_dict(self.TABLE), bert, "token-classification", max_length=5, truncate=True).train[0]
        assert (sample.input_ids, sample.labels, sample.num_targets) == (
            [CLS, *codes("Ann"), SEP],
            [-100, 1, -100, -100, -100],
            1,
        )

    def test_declared_tags(self, bert):
        features = Features({"tokens": List(Value("string")), "ner_tags": List(ClassLabel(names=["A", "B", "C"]))})
        table = Dataset.from_dict({"tokens": [["x"], ["y"]], "ner_tags": [[2], [0]]}, features=features)
        tokens = tokenise(table, bert, "token-classification")
        assert (tokens.label_names, tokens.train[0].labels) == (("A", "B", "C"), [-100, 2, -100])

    @pytest.mark.parametrize(
        ("words", "tags", "message"),
        [
            ([["a", "b"], ["c"]], [[0, 1], [0, 1]], "row 1: 1 words in 'tokens', but 2 tags in 'ner_tags'"),
            ([["a", "b"], []], [[0, 1], []], "row 1: column 'tokens' must hold a list with something in it"),
            ([["a"], None], [[0], [1]], "row 1: column 'tokens' must hold a list with something in it, but holds None"),
            ([["a"], ["b", None]], [[0], [1, 1]], "row 1: column 'tokens' must hold words"),
            (["a", "b"], [[0], [1]], "row 0: column 'tokens' must hold a list"),
            ([["a"], ["b"]], [[0], [None]], "row 1 of the training data holds None"),
        ],
    )
    def test_wrong_rows(self, bert, words, tags, message):
        with pytest.raises(DataError, match=message):
            tokenise(Dataset.from_dict({"tokens": words, "ner_tags": tags}), bert, "token-classification")

    def test_no_word_with_a_token(self, bert):
        with pytest.raises(DataError, match="row 0: no word of it has a token"):
            tokenise(
                Dataset.from_dict({"words": [[""]], "tags": [["x"]]}),
                bert,
                TokenClassification(words="words", label_names=["x", "y"]),
            )


class TestCausalLM:
    def test_one_sample_a_row_ends_with_the_end_of_text(self, letters):
        tokens = tokenise(texts("abc", "de"), letters, "causal-lm")
        assert list(tokens.train) == [([*codes("abc"), END], None, 3, None), ([*codes("de"), END], None, 2, None)]

    def test_one_token_predicts_nothing(self, byte_tokenizer):
        with pytest.raises(DataError, match="row 1: a single token"):
            tokenise(texts("ab", "c"), byte_tokenizer(), "causal-lm")

    def test_packing_joins_documents_and_keeps_the_rest(self, letters):
        packed = CausalLM(packing=True)
        blocks = tokenise(texts("abc", "de"), letters, packed, max_length=5).train
        assert list(blocks) == [([*codes("abc"), END, *codes("d")], None, 4, None), ([*codes("e"), END], None, 1, None)]
        # A single token that is left predicts nothing, and is dropped; empty documents are none.
        assert len(tokenise(texts("abcd", "fghi", "", None), letters, packed, max_length=9).train) == 1
        assert lengths_of(tokenise(texts("abcd", "fghij"), letters, packed, max_length=5).train) == [5, 5]

    def test_packing_does_not_depend_on_num_proc(self, letters, tmp_path, monkeypatch):
        table = texts(*("x" * (1 + n % 7) for n in range(50)))

        def blocks(cache, **options):
            monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / cache)
            return list(tokenise(table, letters, CausalLM(packing=True), max_length=16, **options).train)

        one = blocks("one")
        assert len(one) == 16
        assert blocks("three", num_proc=3) == one
        assert len(list((tmp_path / "three").rglob("*_of_00003.arrow"))) == 3

    def test_nothing_to_pack(self, letters):
        with pytest.raises(DataError, match="The training data has no text"):
            tokenise(texts("", None), letters, CausalLM(packing=True), max_length=8)
        with pytest.raises(DataError, match="Packing and truncation need max_length"):
            tokenise(texts("a"), letters, CausalLM(packing=True))
        with pytest.raises(DataError, match="row 0: column 'number' must hold text, but holds 2"):
            tokenise(
                Dataset.from_dict({"number": [1, 2]}).select([1, 1]), letters, CausalLM(text="number", packing=True), max_length=8
            )


class TestMaskedLM:
    def test_draws_follow_from_seed_epoch_and_number(self, bert):
        train = tokenise(texts("a" * 100, "b" * 20), bert, "masked-lm").train
        assert train.num_targets == [15, 3] and train.lengths == [102, 22]
        assert list(train.in_epoch(1, seed=0)) == list(train.in_epoch(1, seed=0))
        assert train.in_epoch(1, seed=0)[-1] == list(train.in_epoch(1, seed=0))[1]
        draws = [train, train.in_epoch(0, seed=0), train.in_epoch(1, seed=0), train.in_epoch(1, seed=1)]
        assert len({tuple(draw[0].input_ids) for draw in draws}) == 4

    def test_training_hides_others_in_every_epoch(self, bert):
        train = tokenise(texts(*(letter * 40 for letter in "abcdefgh")), bert, "masked-lm").train
        shape = BatchShape(num_pipelines=1, num_replicas=1, num_micro_batches=2, micro_batch_size=4)

        def batches():
            return TrainingBatches(train, Collate(pad_token_id=PAD), shape, seed=5, epochs=2)

        first, last = list(batches()), list(batches())  # the first and the last stage
        assert all(torch.equal(a[0][0], b[0][0]) and torch.equal(a[1][0], b[1][0]) for a, b in zip(first, last, strict=True))
        resumed = batches()
        resumed.load_state_dict(last_state(batches(), trained=2))
        assert all(torch.equal(a[0][0], b[0][0]) for a, b in zip(first[2:], resumed, strict=True))
        hidden = [
            {(int(row.max()), tuple((row != -100).nonzero().flatten().tolist())) for _, (labels, _) in epoch for row in labels}
            for epoch in (first[:2], first[2:])
        ]
        assert all(len(epoch) == 8 for epoch in hidden)
        assert hidden[0].isdisjoint(hidden[1])

    def test_what_is_hidden(self, bert):
        text = "".join(chr(97 + n % 26) for n in range(400))
        train = tokenise(texts(*[text] * 20), bert, MaskedLM(probability=0.5)).train
        plain = [CLS, *codes(text), SEP]
        hidden = masked = kept = 0
        for sample in train:
            chosen = [position for position, label in enumerate(sample.labels) if label != -100]
            assert len(chosen) == sample.num_targets == 200
            assert 0 not in chosen and 401 not in chosen
            assert all(sample.labels[position] == plain[position] for position in chosen)
            assert all(sample.input_ids[position] == plain[position] for position in range(402) if position not in chosen)
            hidden += len(chosen)
            masked += sum(sample.input_ids[position] == MASK for position in chosen)
            kept += sum(sample.input_ids[position] == plain[position] for position in chosen)
        assert 0.77 < masked / hidden < 0.83
        assert 0.08 < kept / hidden < 0.12

    def test_at_least_one_is_hidden(self, bert):
        assert tokenise(texts("a"), bert, "masked-lm").train[0].num_targets == 1

    def test_without_a_mask(self, letters):
        with pytest.raises(DataError, match="no mask token.*'causal-lm'"):
            tokenise(texts("a"), letters, "masked-lm")
        with pytest.raises(ValueError, match="probability must lie between 0 and 1, got 15"):
            MaskedLM(probability=15)


class TestValidation:
    def test_of_every_class_the_same(self, letters):
        table = texts(*"abcdefghij", label=[0] * 5 + [1] * 5)
        tokens = tokenise(table, letters, "sequence-classification").with_validation(0.2)
        assert (len(tokens.train), len(tokens.validation)) == (8, 2)
        assert sorted(sample.labels for sample in tokens.validation) == [0, 1]
        seen = [sample.input_ids[0] for part in (tokens.train, tokens.validation) for sample in part]
        assert sorted(seen) == codes("abcdefghij")

    def test_of_running_text_the_end(self, letters):
        tokens = tokenise(texts("abcdefghi"), letters, CausalLM(packing=True), max_length=2).with_validation(0.2)
        assert list(tokens.validation) == [([*codes("i"), END], None, 1, None)]

    def test_masked_texts(self, bert):
        tokens = tokenise(texts(*"abcdefghij"), bert, "masked-lm").with_validation(0.3)
        assert (len(tokens.train), len(tokens.validation)) == (7, 3)
        assert tokens.validation[0].num_targets == 1

    def test_a_part_that_is_there_stays(self, letters):
        tokens = tokenise(Tables(train=texts("ab"), validation=texts("cd")), letters, "causal-lm")
        assert tokens.with_validation(0.5) is tokens

    def test_impossible(self, letters):
        tokens = tokenise(texts("ab"), letters, "causal-lm")
        with pytest.raises(DataError, match="single sample"):
            tokens.with_validation(0.5)
        with pytest.raises(ValueError, match="between 0 and 1, got 1.5"):
            tokens.with_validation(1.5)


def test_unknown_task(letters):
    with pytest.raises(DataError, match="Unknown task 'casual-lm'. Did you mean 'causal-lm'"):
        tokenise(texts("a"), letters, "casual-lm")


class TestCache:
    def test_only_the_first_of_several_processes_tokenises(self, byte_tokenizer, own_cache, tmp_path):
        starts = multiprocessing.get_context("fork")
        tokenizer, log = byte_tokenizer("eos_token"), tmp_path / "log"
        log.touch()
        ranks = [starts.Process(target=_tokenise_and_log, args=(tokenizer, log)) for _ in range(3)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(60)
        assert [rank.exitcode for rank in ranks] == [0, 0, 0]
        assert log.read_text() == "tokenised\n"
        assert len(list(own_cache.glob("*.arrow"))) == 1

    def test_what_the_last_call_truncated_does_not_matter(self, letters, own_cache):
        table = texts("abcd", "efgh", label=[0, 1])
        for _ in range(2):
            for length in (3, 4):
                tokenise(table, letters, "sequence-classification", max_length=length, truncate=True)
        assert len(list(own_cache.glob("*.arrow"))) == 2

    @pytest.mark.parametrize("other", ["rows", "task", "tokenizer", "length"])
    def test_whatever_differs_is_tokenised_anew(self, byte_tokenizer, own_cache, other):
        def make(changed):
            table = texts("ab", "cx" if changed == "rows" else "cd")
            tokenizer = byte_tokenizer(*(["eos_token"] if changed != "tokenizer" else []))
            task = "causal-lm" if changed != "task" else CausalLM(packing=True)
            return list(tokenise(table, tokenizer, task, max_length=9 if changed != "length" else 2, truncate=True).train)

        assert make("nothing") == make("nothing") != make(other)

    def test_the_bar_is_shown_by_who_works(self, letters, capfd):
        table = texts("ab")
        tokenise(table, letters, "causal-lm", progress=False)
        assert "tokenising" not in capfd.readouterr().err
        tokenise(texts("ac"), letters, "causal-lm")
        assert "tokenising training data" in capfd.readouterr().err
        tokenise(texts("ac"), letters, "causal-lm")
        assert "tokenising" not in capfd.readouterr().err

    def test_a_cache_that_cannot_be_written(self, letters, own_cache):
        own_cache.parent.write_text("a file where the folder should be")
        with pytest.raises(DataError, match="can't be written.*Set HF_DATASETS_CACHE"):
            tokenise(texts("ab"), letters, "causal-lm")


def last_state(batches, *, trained):
    for _ in batches:
        pass
    return batches.state_dict(trained)


def _tokenise_and_log(tokenizer, log):
    from avgpipe_ds.data import texts as module

    encode = module.Texts.__call__

    def logged(self, batch, rows):
        with log.open("a") as file:
            file.write("tokenised\n")
        return encode(self, batch, rows)

    module.Texts.__call__ = logged
    assert len(tokenise(texts("ab", "cd"), tokenizer, "causal-lm").train) == 2
