"""`evaluate`: the outputs of a whole data set in its order, whatever its micro-batches are and wherever they are computed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from avgpipe_ds.hf.losses import CausalLMLoss
from tests.distributed.models import VOCABULARY, WIDTH, Run, Task, merged, weights_of
from tests.distributed.oracle import SingleProcess
from tests.distributed.test_data_parallel import ZERO1
from tests.distributed.test_evaluation import TwofoldTask, go_on
from tests.distributed.world import World

NUM_SAMPLES = 60
TWO = {"num_pipelines": 2}
SIZES = ([1] * 18 + [4, 7], [5, 9, 17])
"""Of the micro-batches of two replicas, which are not the same in number, nor one round only."""


def data_set() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(NUM_SAMPLES, WIDTH, generator=generator), torch.randn(NUM_SAMPLES, WIDTH, generator=generator)


def dealt(replica: int, replicas: int) -> tuple[list[tuple[Tensor, Tensor]], list[list[int | None]]]:
    """Micro-batches and the places of their rows, in any order; the last of each micro-batch of several only fills up."""
    places = torch.randperm(NUM_SAMPLES, generator=torch.Generator().manual_seed(6)).tolist()
    sizes = SIZES if replicas == 2 else (SIZES[0] + SIZES[1],)
    samples: list[list[int | None]] = []
    for number, of_replica in enumerate(sizes):
        for size in of_replica:
            taken, places = places[:size], places[size:]
            if number == replica:
                samples.append([*taken, None] if size > 1 else taken)
    assert not places
    inputs, labels = data_set()
    index = [[0 if place is None else place for place in rows] for rows in samples]
    return [(inputs[rows], labels[rows]) for rows in index], samples


@dataclass(frozen=True)
class NormedTask(TwofoldTask):
    """Buffers differ between pipelines, and between what is trained and what has run ahead."""

    def layers(self) -> list[Any]:
        from deepspeed.pipe import LayerSpec

        return [LayerSpec(nn.BatchNorm1d, WIDTH), *super().layers()]


def own_state(pipeline: Any) -> dict[str, Tensor]:
    """A pipeline's weights, with the buffers that it has after the iterations trained so far."""
    names = [name for name, _ in pipeline.module.named_buffers()]
    return weights_of(pipeline.module) | dict(zip(names, pipeline.start_of_iteration[1], strict=True))


class Spy:
    """Metrics that keep what they were given."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, Any]] = []

    def __call__(self, predictions: Any, labels: Any) -> dict[str, Any]:
        self.seen.append((predictions, labels))
        return {"rows": len(labels), "mean": np.asarray(labels).mean()}


def classes_only(outputs: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    assert outputs[0].shape == labels.shape
    return outputs[1]


def evaluate_in_many_ways(run: Run) -> dict[str, Any]:
    engine = run.engine()
    replica = engine.grid.get_data_parallel_rank()
    data = run.task.data()
    for _ in range(2):
        engine.train_batch(data)
    batches, samples = dealt(replica, engine.grid.get_data_parallel_world_size())
    got: dict[str, Any] = {"z": engine.reference_state_dict()}
    got["w"] = [own_state(pipeline) for pipeline in engine.pipelines]
    spies = {name: Spy() for name in ("samples", "own order", "pipelines", "classes")}
    got["samples"] = engine.evaluate(batches, metrics=spies["samples"], samples=samples)
    got["own order"] = engine.evaluate(iter(batches), metrics=spies["own order"])
    got["loss"] = engine.evaluate(batches, samples=samples)
    got["pipelines"] = engine.evaluate(iter(batches), metrics=spies["pipelines"], samples=iter(samples), weights="pipelines")
    got["classes"] = engine.evaluate(batches, metrics=spies["classes"], samples=samples, reduce_outputs=classes_only)
    got["seen"] = {name: spy.seen for name, spy in spies.items()}
    assert engine.module.training
    engine.train_batch(data)
    got["afterwards"] = weights_of(engine.module)
    engine.close()
    return got


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("run", "num_replicas"),
    [
        pytest.param(Run(task=NormedTask(num_layers=2, dropout=0.2), num_stages=3, avgpipe=TWO), 1, id="buffers"),
        pytest.param(Run(task=TwofoldTask(num_layers=3, dropout=0.2), config=ZERO1, avgpipe=TWO), 2, id="replicas"),
    ],
)
def test_all_samples_in_the_order_of_the_data_set(worlds: dict[int, World], run: Run, num_replicas: int) -> None:
    num_pipelines = 2
    results = worlds[run.num_stages * num_replicas].run(evaluate_in_many_ways, run)
    inputs, labels = data_set()
    seen = {name: [spied for result in results for spied in result["seen"][name]] for name in results[0]["seen"]}
    assert {name: len(calls) for name, calls in seen.items()} == {
        name: num_pipelines if name == "pipelines" else 1 for name in seen
    }

    def outputs_of(weights: list[dict[str, Tensor]]) -> tuple[Tensor, Tensor]:
        model = run.task.plain().eval()
        model.load_state_dict(merged(weights))
        with torch.no_grad():
            return reduce(lambda x, layer: layer(x), model.functions, inputs)

    values, classes = outputs_of([result["z"] for result in results])
    own = [outputs_of([result["w"][pipeline] for result in results]) for pipeline in range(num_pipelines)]
    for (found, of), expected in zip([*seen["samples"], *seen["pipelines"]], [(values, classes), *own], strict=True):
        assert isinstance(found, tuple) and all(isinstance(part, np.ndarray) for part in found)
        np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(found[1], expected[1])
        np.testing.assert_array_equal(of, labels)
    np.testing.assert_array_equal(seen["classes"][0][0], classes)
    rows = [
        0 if place is None else place
        for replica in range(num_replicas)
        for of_batch in dealt(replica, num_replicas)[1]
        for place in of_batch
    ]
    np.testing.assert_array_equal(seen["own order"][0][1], labels[rows])
    np.testing.assert_allclose(seen["own order"][0][0][0], values[rows], rtol=1e-5, atol=1e-6)

    for result in results:
        assert result["samples"] == results[0]["samples"] and set(result["samples"]) == {"loss", "rows", "mean"}
        assert result["samples"]["rows"] == NUM_SAMPLES and result["samples"]["mean"] == pytest.approx(float(labels.mean()))
        assert result["loss"] == {"loss": result["samples"]["loss"]}
        assert [scores["loss"] for scores in result["pipelines"]] == [scores["loss"] for scores in results[0]["pipelines"]]
        assert len(result["pipelines"]) == num_pipelines
    assert len({scores["loss"] for scores in results[0]["pipelines"]} | {results[0]["loss"]["loss"]}) == num_pipelines + 1
    # A loss that is no WeightedLoss: the mean over rows of what it is on each micro-batch, rows that fill up not counted.
    expected = 0.0
    for replica in range(num_replicas):
        for of_batch in dealt(replica, num_replicas)[1]:
            rows = [0 if place is None else place for place in of_batch]
            real = sum(place is not None for place in of_batch)
            expected += float(F.mse_loss(values[rows], labels[rows])) * real / NUM_SAMPLES
    assert results[0]["loss"]["loss"] == pytest.approx(expected, rel=1e-5)
    undisturbed = worlds[run.num_stages * num_replicas].run(go_on, run)
    for result, weights in zip(results, undisturbed, strict=True):
        trained = [name for name in weights if "running_" not in name and "num_batches" not in name]
        assert all(torch.equal(result["afterwards"][name], weights[name]) for name in trained)


SHAPES = [[(8, 5), (1, 200), (3, 37)], [(2, 111), (5, 6), (7, 90)], [(4, 200), (8, 64), (1, 5)]]
"""(samples, length) of the micro-batches of three batches; the last is one sample."""


def text(count: int, length: int, seed: int) -> Tensor:
    """Token ids `[count, length]`; sample i is padded with -100 after a length of its own."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (count, length), generator=generator)
    for row in range(1, count):
        ids[row, int(torch.randint(2, length + 1, (), generator=generator)) :] = -100
    return ids


def texts() -> list[list[Tensor]]:
    return [[text(*shape, seed=17 * batch + place) for place, shape in enumerate(batch_)] for batch, batch_ in enumerate(SHAPES)]


@dataclass(frozen=True)
class TextTask(Task):
    """A language model; each batch's weights make the mean over micro-batches that over the batch's tokens."""

    @property
    def loss(self) -> Any:
        return CausalLMLoss(label_smoothing=0.1)

    def data(self, seed: int = 1) -> Iterator[tuple[Any, Any]]:
        while True:
            for batch in texts():
                targets = sum(int((ids[:, 1:] != -100).sum()) for ids in batch)
                for ids in batch:
                    yield ids.clamp(min=0), (ids, torch.full((len(ids),), len(batch) / targets))


def with_rows_that_fill_up(ids: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Weights that are no means of anything: only which are 0, and that the others are equal, matters."""
    padded = torch.cat([ids, ids[:1]])
    return padded.clamp(min=0), (padded, torch.tensor([0.25] * len(ids) + [0.0]))


def token_accuracy(predictions: list[Any], labels: list[Any]) -> dict[str, float]:
    assert isinstance(predictions, list) and [len(row) for row in predictions] == [len(row) for row in labels]
    right = [(p[:-1] == of[1:])[of[1:] != -100] for p, of in zip(predictions, labels, strict=True)]
    return {"accuracy": float(np.concatenate(right).mean()), "samples": len(labels)}


def best_tokens(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.argmax(-1)


def train_on_text(run: Run) -> tuple[list[float], dict[str, float]]:
    engine, data = run.engine(), run.task.data()
    losses = [float(engine.train_batch(data)) for _ in range(run.iterations)]
    batches = [with_rows_that_fill_up(ids) for batch in texts() for ids in batch]
    scores = engine.evaluate(batches, metrics=token_accuracy, reduce_outputs=best_tokens)
    alone = engine.evaluate(batches, metrics=token_accuracy, reduce_outputs=best_tokens, weights="pipelines")
    assert alone == [scores]  # one pipeline is the model
    engine.close()
    return losses, scores


@pytest.mark.timeout(180)
@pytest.mark.parametrize("clipping", [0.0, 0.05])
def test_text_of_any_length_trains_and_scores_as_on_one_process(worlds: dict[int, World], clipping: float) -> None:
    """The oracle takes each batch sample by sample: the mean over all its tokens, no micro-batches, no weights."""
    run = Run(task=TextTask(tied=True), num_micro_batches=3, iterations=6, clipping=clipping, avgpipe={"num_pipelines": 1})
    results = worlds[run.num_stages].run(train_on_text, run)
    single = SingleProcess(run.task, run.optimizer, clipping)

    def of_sample(ids: Tensor) -> tuple[Tensor, Tensor]:
        """The token losses of a sample, and the tokens predicted."""
        ids = ids[ids != -100]
        logits = reduce(lambda x, layer: layer(x), single.model.functions, ids[None])[0]
        return F.cross_entropy(logits[:-1], ids[1:], reduction="none", label_smoothing=0.1), logits[:-1].argmax(-1) == ids[1:]

    for iteration in range(run.iterations):
        batch = texts()[iteration % len(SHAPES)]
        loss = torch.cat([of_sample(row)[0] for ids in batch for row in ids]).mean()
        assert results[0][0][iteration] == results[1][0][iteration] == pytest.approx(loss.item(), rel=1e-5)
        loss.backward()
        if clipping:
            torch.nn.utils.clip_grad_norm_(single.trained, clipping)
        single.optimizer.step()
        single.optimizer.zero_grad()
    with torch.no_grad():
        everything = [of_sample(row) for batch in texts() for ids in batch for row in ids]
    expected = {
        "loss": float(torch.cat([losses for losses, _ in everything]).mean()),
        "accuracy": float(torch.cat([right for _, right in everything]).float().mean()),
        "samples": len(everything),
    }
    for _, scores in results:
        assert scores == pytest.approx(expected, rel=1e-5)


METRIC = """
import datasets
import evaluate


class Distance(evaluate.Metric):
    def _info(self):
        row = datasets.Sequence(datasets.Value("float32"))
        features = datasets.Features({"predictions": row, "references": row})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references):
        pairs = [(p, r) for row, other in zip(predictions, references) for p, r in zip(row, other)]
        return {"distance": sum(abs(p - r) for p, r in pairs) / len(pairs)}
"""


def answer(call: Callable[[], Any]) -> str:
    try:
        return f"returned {call()}"
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"


def raising(*given: Any) -> Any:
    raise ArithmeticError("not today")


def ending(batches: Sequence[Any], error: Exception) -> Iterator[Any]:
    yield from batches
    raise error


def go_wrong(run: Run, folder: Path) -> tuple[dict[str, str], list[dict[str, float]], dict[str, Tensor]]:
    """Evaluations that fail on every rank alike, good ones, then training as if nothing had been."""
    engine, data = run.engine(), run.task.data()
    rank = engine.global_rank
    for _ in range(2):
        engine.train_batch(data)
    batches = list(islice(run.task.data(seed=3), 3))
    places = [[0, 1, 2], [3, 4, 5], [6, 7, None]]
    mean = Spy()
    said: dict[str, str] = {}
    scores: list[dict[str, float]] = []

    def attempt(name: str, given: Any = batches, **options: Any) -> None:
        said[name] = answer(lambda: scores.append(engine.evaluate(given, **options)) or list(scores[-1]))

    attempt("metrics raise", metrics=raising)
    attempt("no dictionary", metrics=lambda predictions, labels: 3.0)
    attempt("reserved name", metrics=lambda predictions, labels: {"loss": 3.0})
    attempt("no number", metrics=lambda predictions, labels: {"matrix": predictions})
    attempt("reduction raises", metrics=mean, reduce_outputs=raising)
    attempt("reduction loses rows", metrics=mean, reduce_outputs=lambda outputs, labels: outputs.mean())
    attempt("reduction is no tensor", metrics=mean, reduce_outputs=lambda outputs, labels: None)
    attempt("reduction for nothing", reduce_outputs=classes_only)
    attempt("data raises", ending(batches, OSError("disk on fire")) if rank == 0 else batches)
    attempt("data ends early", batches if rank == 0 else batches[:1])
    attempt("empty", [])
    attempt("no iterable", 7)
    attempt("no pair", [torch.zeros(3, WIDTH)])
    attempt("different", weights="reference" if rank == 0 else "pipelines")
    attempt("whose", weights="mine")
    attempt("no metrics", metrics=7)
    attempt("rows of samples", metrics=mean, samples=[*places[:2], [6, 7]])
    attempt("fewer samples", metrics=mean, samples=places[:2])
    attempt("twice", metrics=mean, samples=[[0, 1, 2], [3, 4, 5], [6, 7, 5]])
    attempt("all fill up", metrics=mean, samples=[[None] * 3] * 3)
    attempt("unknown metric", metrics=[str(folder / "nothing")])
    hidden, sys.modules["evaluate"] = sys.modules.get("evaluate"), None  # type: ignore[assignment]
    attempt("not installed", metrics="accuracy")
    del sys.modules["evaluate"]
    if hidden is not None:
        sys.modules["evaluate"] = hidden
    attempt("named", metrics=[str(folder / "distance")], samples=places)
    attempt("good", metrics=lambda p, of: {"distance": float(np.abs(p - of).mean())}, samples=places)
    for pipeline in engine.pipelines:
        pipeline.module.loss_fn, loss_fn = raising, pipeline.module.loss_fn
    attempt("loss raises")
    for pipeline in engine.pipelines:
        pipeline.module.loss_fn = lambda outputs, labels: (outputs - labels, {"a": 1})
    attempt("loss of rows")
    for pipeline in engine.pipelines:
        pipeline.module.loss_fn = loss_fn
    engine.train_batch(data)
    weights = weights_of(engine.module)
    engine.close()
    return said, scores, weights


BOTH = ("ValueError: {}", "ValueError: {}")
FIRST, LAST = ("{}", "RemoteError: rank 0 failed: {}"), ("RemoteError: rank 1 failed: {}", "{}")
LAST_VALUE = ("ValueError: rank 1: {}", "{}")
WRONG = {
    "metrics raise": (LAST, "ArithmeticError: not today"),
    "no dictionary": (LAST_VALUE, "ValueError: metrics must return a dictionary of numbers, got a float"),
    "reserved name": (LAST_VALUE, "ValueError: metrics must return names other than 'loss', as strings, got 'loss'"),
    "no number": (LAST_VALUE, "ValueError: metrics must return numbers, but 'matrix' is a ndarray"),
    "reduction raises": (LAST, "ArithmeticError: not today"),
    "reduction loses rows": (LAST_VALUE, "ValueError: metrics need outputs with one row per sample, [3, ...] here, got []"),
    "reduction is no tensor": (LAST, "TypeError: metrics need the outputs as a tensor or a tuple of tensors, got a NoneType"),
    "reduction for nothing": (BOTH, "reduce_outputs is for what metrics look at: pass metrics, too, or leave it out"),
    "data raises": (FIRST, "OSError: disk on fire"),
    "data ends early": (
        BOTH,
        "evaluate() wants the same micro-batches on the first and the last stage, but in one round the data of",
    ),
    "empty": (BOTH, "evaluate() got no micro-batches: the data is empty"),
    "no iterable": (
        ("TypeError: {}", "TypeError: {}"),
        "evaluate() wants an iterable of micro-batches (inputs, labels), got a int",
    ),
    "no pair": (BOTH, "the data iterator must give pairs (inputs, labels) of a micro-batch, got a Tensor"),
    "different": (BOTH, "evaluate() was called differently on different ranks, pass the same on all: weights='pipelines'"),
    "whose": (BOTH, """evaluate() wants weights="reference" or "pipelines", got 'mine'"""),
    "no metrics": (BOTH, "evaluate() wants metrics as a function of predictions and labels, or as names of the evaluate library"),
    "rows of samples": (LAST_VALUE, "ValueError: samples gives the places of 2 rows for a micro-batch of 3"),
    "fewer samples": (BOTH, "evaluate() wants as many entries of samples as micro-batches"),
    "twice": (LAST_VALUE, "ValueError: sample 5 came twice: give None in `samples` for rows that only fill up a micro-batch"),
    "all fill up": (LAST_VALUE, "ValueError: metrics need at least one sample, but every row only fills up"),
    "unknown metric": (LAST_VALUE, "ValueError: the evaluate library can't load the metric"),
    "not installed": (
        LAST,
        "ImportError: metrics=['accuracy'] are names of the evaluate library, which is not installed: pip install",
    ),
    "loss raises": (LAST, "ArithmeticError: not today"),
    "loss of rows": (LAST_VALUE, "ValueError: evaluate() averages scalar losses, got a tensor of shape (3, 16) from loss_fn"),
}


@pytest.mark.timeout(180)
def test_what_goes_wrong_is_an_error_on_every_rank_and_training_goes_on(
    worlds: dict[int, World], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "distance").mkdir()
    (tmp_path / "distance" / "distance.py").write_text(METRIC)
    run = Run(task=Task(dropout=0.2), avgpipe={"num_pipelines": 2})
    results = worlds[run.num_stages].run(go_wrong, run, tmp_path)
    expected = worlds[run.num_stages].run(go_on, run)
    for rank, ((said, scores, weights), undisturbed) in enumerate(zip(results, expected, strict=True)):
        assert said["good"] == said["named"] == "returned ['loss', 'distance']"
        assert scores[0] == pytest.approx(scores[1], rel=1e-5)
        for name, (form, message) in WRONG.items():
            assert said[name].startswith(form[rank].format(message)), (name, said[name])
        assert set(said) == {*WRONG, "good", "named"}
        assert all(torch.equal(weights[name], value) for name, value in undisturbed.items())
