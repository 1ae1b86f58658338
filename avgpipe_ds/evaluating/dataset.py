"""Evaluation of a whole data set: its mean loss, and metrics that look at the outputs of all samples at once.

The data comes in micro-batches of any sizes and lengths, every replica has its own, and nobody knows how many there are. So it
is taken in rounds. At the start of each the ranks tell each other how much they have and what went wrong in the round before: bad
data, a loss or a `reduce_outputs` that raises are errors on all ranks at one point, no stage runs far ahead of the next, and the
engine stays usable. Outputs stay on the host of the last stage that computed them until the end; then one rank gets them all,
computes the metrics, and tells the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import islice, zip_longest
from typing import Any, TypeVar

from avgpipe_ds import deepspeed_compat as compat
from avgpipe_ds.averaging.reference import swapped
from avgpipe_ds.data_feed import MicroBatch
from avgpipe_ds.ensemble import Ensemble
from avgpipe_ds.errors import AgreedError
from avgpipe_ds.evaluating.findings import Findings, Samples
from avgpipe_ds.evaluating.metrics import Metrics, Scores, checked_scores
from avgpipe_ds.evaluating.predictions import Chunk, in_order
from avgpipe_ds.evaluating.request import Request
from avgpipe_ds.evaluation import forward_all
from avgpipe_ds.execution.loss_record import LOSS
from avgpipe_ds.execution.pipeline import Pipeline
from avgpipe_ds.execution.stage import Stage

__all__ = ["evaluate_dataset"]

T = TypeVar("T")
Item = tuple[MicroBatch, Samples | None]

_CHUNKS = "evaluation-chunks"

_ROUND = 16
"""Micro-batches between two meetings: enough to keep a pipeline filled, few enough to keep."""


def evaluate_dataset(
    ensemble: Ensemble, request: Request, batches: Iterable[Any], samples: Iterable[Samples] | None
) -> list[Scores]:
    """`AvgPipeEngine.evaluate`; one result per model. Every rank calls it.

    Raises:
        AgreedError: on every rank.

    """
    stage = ensemble.stage
    metrics = _agree(stage, request)
    models = _Models(ensemble, request)
    data = _items(stage, batches, samples) if stage.topology.takes_data else iter(())
    with models.ready():
        empty = not models.look_at(data)
        while not empty and models.look_at(data):
            pass
    if empty:
        raise AgreedError(ValueError("evaluate() got no micro-batches: the data is empty"))
    return models.scores(metrics)


class _Models:
    """The models that are evaluated together, each on the same micro-batches, and what was found of them on this rank."""

    def __init__(self, ensemble: Ensemble, request: Request) -> None:
        self._stage = stage = ensemble.stage
        self._request = request
        pipelines = ensemble.pipelines if request.weights == "pipelines" else ensemble.pipelines[:1]
        self._engines = [pipeline.engine for pipeline in pipelines]
        self._weights = [_own_weights(pipeline) for pipeline in pipelines]
        if request.weights == "reference":
            self._weights = [ensemble.reference_weights()]
        replica_id = stage.topology.replica_ranks.index(stage.topology.rank)
        self._findings = [Findings(request, replica_id) for _ in pipelines]
        self._problem: Exception | None = None

    @contextmanager
    def ready(self) -> Iterator[None]:
        """In the block the modules hold the weights that are evaluated. All ranks enter it."""
        with ExitStack() as inside:
            for weights in self._weights:
                inside.enter_context(weights)
            for engine in self._engines:
                engine.module.eval()
                inside.callback(engine.module.train)
            yield

    def look_at(self, data: Iterator[Item]) -> bool:
        """A round: evaluate the next micro-batches. Returns whether there were any.

        Raises:
            AgreedError: on all ranks, of the data, or of what looked at the outputs of the round before.

        """
        stage, topology = self._stage, self._stage.topology
        items, problem = _attempt(lambda: _take(data))
        told = stage.rendezvous.agree(("evaluate data",), topology.world_ranks, self._problem or problem, len(items or ()))
        counts = dict(zip(topology.world_ranks, told, strict=True))
        _check_counts(stage, counts)
        for engine, findings in zip(self._engines, self._findings, strict=True):
            self._run(engine, findings, items or [], counts[topology.pipeline_ranks[0]])
        return any(told)

    def _run(self, engine: compat.StageEngine, findings: Findings, items: Sequence[Item], count: int) -> None:
        def finish(number: int, outputs: Any) -> None:
            if self._problem is None:  # it is told at the next meeting; the other stages wait for nothing of this one until then
                (_, labels), samples = items[number]
                _, self._problem = _attempt(lambda: findings.add(engine.module.loss_fn, outputs, labels, samples))

        forward_all(engine, self._stage, [inputs for (inputs, _), _ in items], count, finish)

    def scores(self, metrics: Metrics | None) -> list[Scores]:
        """The loss of each model, and its metrics, on every rank. All ranks call it.

        Args:
            metrics: what computes them, on the rank that does.

        Raises:
            AgreedError: on all ranks.

        """
        stage, everybody = self._stage, self._stage.topology.world_ranks
        mine = [(float(found.loss), float(found.num_targets), len(found.chunks)) for found in self._findings]
        told = stage.rendezvous.gather(("evaluated",), everybody, mine if stage.topology.is_last else None)
        sums = {rank: theirs for rank, theirs in zip(everybody, told, strict=True) if theirs is not None}
        scores = [{LOSS: _mean_loss(replicas)} for replicas in zip(*sums.values(), strict=True)]
        if self._request.metrics is None:
            return scores
        chunks = [
            _gather(stage, found.chunks, {rank: theirs[model][2] for rank, theirs in sums.items()})
            for model, found in enumerate(self._findings)
        ]
        return [{**score, **more} for score, more in zip(scores, _report(stage, metrics, chunks), strict=True)]


def _own_weights(pipeline: Pipeline) -> AbstractContextManager[None]:
    """A pipeline's weights are its module's; but its buffers may be those of forwards that have run ahead."""
    return swapped(dict(zip(pipeline.module.buffers(), pipeline.start_of_iteration[1], strict=True)))


def _attempt(call: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """What a call gives, or what it raises, for all ranks to be told."""
    try:
        return call(), None
    except Exception as error:  # noqa: BLE001
        return None, error


def _agree(stage: Stage, request: Request) -> Metrics | None:
    """All ranks want the same, and it can be. Returns what computes the metrics, on the rank that does.

    Raises:
        AgreedError: on all ranks.

    """
    metrics: Metrics | None = None
    _, problem = _attempt(request.check)
    if problem is None and stage.topology.rank == _reporter(stage):
        metrics, problem = _attempt(request.load_metrics)
    wishes = stage.rendezvous.agree(("evaluate",), stage.topology.world_ranks, problem, str(request))
    if len(set(wishes)) > 1:
        different = " / ".join(sorted(set(wishes)))
        raise AgreedError(ValueError(f"evaluate() was called differently on different ranks, pass the same on all: {different}"))
    return metrics


def _items(stage: Stage, batches: Any, samples: Iterable[Samples] | None) -> Iterator[Item]:
    """The micro-batches of this rank, each with the places of its rows."""
    if not isinstance(batches, Iterable):
        raise TypeError(f"evaluate() wants an iterable of micro-batches (inputs, labels), got a {type(batches).__name__}")
    if samples is None:
        for item in batches:
            yield stage.feed.prepare(item), None
        return
    for item, places in zip_longest(batches, samples):
        if item is None or places is None:
            raise ValueError("evaluate() wants as many entries of samples as micro-batches, but one of the two ends first")
        yield stage.feed.prepare(item), places


def _take(data: Iterator[Item]) -> list[Item]:
    return list(islice(data, _ROUND))


def _check_counts(stage: Stage, counts: Mapping[int, int]) -> None:
    """The two ranks of a replica that take data have the same number of micro-batches.

    Raises:
        AgreedError: on all ranks.

    """
    ranks = stage.topology.data_ranks
    pairs = zip(ranks[::2], ranks[1::2], strict=True) if stage.topology.num_stages > 1 else ()
    for first, last in pairs:
        if counts[first] != counts[last]:
            raise AgreedError(
                ValueError(
                    "evaluate() wants the same micro-batches on the first and the last stage, but in one round the data of rank "
                    f"{first} gave {counts[first]}, that of rank {last} {counts[last]}"
                )
            )


def _mean_loss(replicas: Sequence[tuple[float, float, int]]) -> float:
    """From the sums of all replicas; not a number where there is no target."""
    loss, num_targets = (sum(sums[part] for sums in replicas) for part in (0, 1))
    return loss / num_targets if num_targets else math.nan


def _reporter(stage: Stage) -> int:
    """The rank that computes metrics: the last stage of the first replica."""
    return stage.topology.data_ranks[min(1, stage.topology.num_stages - 1)]


def _gather(stage: Stage, mine: Sequence[Chunk], counts: Mapping[int, int]) -> list[Chunk]:
    """The chunks of all replicas, on the rank that computes metrics; none elsewhere.

    Args:
        stage: this rank's place.
        mine: of this rank.
        counts: how many each last stage has.

    """
    rank, reporter, mailbox = stage.topology.rank, _reporter(stage), stage.mailbox
    if rank != reporter:
        for chunk in mine:
            mailbox.send(reporter, (_CHUNKS, rank), chunk)
        return []
    chunks = list(mine)
    for other, count in counts.items():
        for _ in range(count if other != rank else 0):
            while not mailbox.has((_CHUNKS, other)):
                mailbox.wait()
            chunks.append(mailbox.take((_CHUNKS, other)).payload)
    return chunks


def _report(stage: Stage, metrics: Metrics | None, chunks: Sequence[Sequence[Chunk]]) -> list[Scores]:
    """The metrics of every model, computed on one rank and told to all.

    Raises:
        AgreedError: on all ranks.

    """
    scores: list[Scores] | None = None
    problem: Exception | None = None
    if metrics is not None:
        compute = metrics
        scores, problem = _attempt(lambda: [checked_scores(compute(*in_order(of_model))) for of_model in chunks])
    told = stage.rendezvous.agree(("metrics",), stage.topology.world_ranks, problem, scores)
    return next(scores for scores in told if scores is not None)
