"""The method of an engine that evaluates a whole data set."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, overload

from avgpipe_ds.ensemble import Ensemble
from avgpipe_ds.evaluating.dataset import evaluate_dataset
from avgpipe_ds.evaluating.metrics import Metrics, Scores
from avgpipe_ds.evaluating.request import EvaluatedWeights, Request

__all__ = ["EvaluatesDataSets"]


class EvaluatesDataSets:
    """What `AvgPipeEngine` has for it."""

    _ensemble: Ensemble

    @overload
    def evaluate(
        self,
        batches: Iterable[Any],
        *,
        metrics: Metrics | str | Sequence[str] | None = None,
        samples: Iterable[Sequence[int | None]] | None = None,
        weights: Literal["reference"] = "reference",
        reduce_outputs: Callable[[Any, Any], Any] | None = None,
    ) -> Scores: ...

    @overload
    def evaluate(
        self,
        batches: Iterable[Any],
        *,
        metrics: Metrics | str | Sequence[str] | None = None,
        samples: Iterable[Sequence[int | None]] | None = None,
        weights: Literal["pipelines"],
        reduce_outputs: Callable[[Any, Any], Any] | None = None,
    ) -> list[Scores]: ...

    def evaluate(
        self,
        batches: Iterable[Any],
        *,
        metrics: Metrics | str | Sequence[str] | None = None,
        samples: Iterable[Sequence[int | None]] | None = None,
        weights: EvaluatedWeights = "reference",
        reduce_outputs: Callable[[Any, Any], Any] | None = None,
    ) -> Scores | list[Scores]:
        """Evaluate a whole data set; training work in flight is left as it is.

        Args:
            batches: the micro-batches of this data-parallel replica, pairs `(inputs, labels)` of any sizes and lengths; the same
                ones on its first and its last stage, the others need none. Replicas may have different numbers of them.
            metrics: `metrics(predictions, labels)`, which gives numbers by name from the outputs and labels of all samples of all
                replicas: an array `[samples, ...]` of each, or a list of arrays where samples differ in shape; tuples of those if
                the model's outputs are a tuple. It runs on one rank. Or names of metrics of the `evaluate` library, or folders
                with their scripts.
            samples: beside each micro-batch, the place in the data set of each of its rows, None for a row that only fills up.
                By default the data set is the rows in their order, those of replica 0 first, without rows of weight 0.
            weights: "reference", or "pipelines" for one result per pipeline, on its own weights.
            reduce_outputs: `reduce_outputs(outputs, labels)` of a micro-batch, on the device of the last stage; what it returns
                is kept for `metrics` in place of the outputs: `outputs.argmax(-1)`, say, of the logits of a language model.

        Returns:
            On every rank "loss", and the metrics. The loss is the mean over all targets if `loss_fn` is an
            `avgpipe_ds.weighted_loss.WeightedLoss`, as all defaults of `avgpipe_ds.hf` are. Any other `loss_fn` is taken to be a
            mean over the rows of its micro-batch, and the loss is the mean over all rows.

        Raises:
            ValueError: on every rank, if the ranks or the stages disagree, or metrics get something else than rows of samples.
            ImportError: metrics are named, but the `evaluate` library is not installed.
            Exception: on every rank, what the data, `loss_fn`, `metrics` or `reduce_outputs` raised.

        """
        request = Request(metrics=metrics, weights=weights, reduce_outputs=reduce_outputs)
        with self._ensemble.together("evaluate"):
            scores = evaluate_dataset(self._ensemble, request, batches, samples)
        return scores if weights == "pipelines" else scores[0]
