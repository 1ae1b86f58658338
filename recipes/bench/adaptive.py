"""Algorithm 1 in a running job: how far it raises the advance, and after how many iterations."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from common.process_groups import released_process_groups

from avgpipe_ds.tuning.advance_search import Decision
from avgpipe_ds.tuning.setting import Setting
from bench.contenders.elastic import Elastic
from bench.workload import Workload

__all__ = ["Search", "search_advance"]

_MOST_ITERATIONS = 500


@dataclass(frozen=True, kw_only=True)
class Search:
    """One job with `"advance": "auto"`.

    Attributes:
        start: N, M and the advance that it began with.
        decisions: all of them, in order.
        iterations: after which it had settled.
    """

    start: Setting
    decisions: Sequence[Decision]
    iterations: int

    @property
    def settled(self) -> Setting:
        """What it came to."""
        last = self.decisions[-1].advance
        return Setting(num_pipelines=self.start.num_pipelines, num_micro_batches=self.start.num_micro_batches, advance=last)

    def as_json(self) -> dict[str, Any]:
        """Everything."""
        decisions = [asdict(decision) for decision in self.decisions]
        return {**asdict(self.settled), "iterations": self.iterations, "decisions": decisions}


def search_advance(workload: Workload, start: Setting) -> Search:
    """Train with `"advance": "auto"` until it is settled. Every rank calls it.

    Raises:
        RuntimeError: on every rank, it does not settle.
    """
    contender = Elastic(
        key="auto",
        name="auto",
        num_pipelines=start.num_pipelines,
        schedule="advance_forward",
        advance="auto",
    )
    with released_process_groups():
        training = contender.build(workload, start.num_micro_batches)
        iterations = 0
        try:
            while not training.engine.advance.settled and iterations < _MOST_ITERATIONS:
                training.train_batch()
                iterations += 1
            decisions, settled = list(training.engine.advance.decisions), training.engine.advance.settled
        finally:
            training.close()
        del training
    if not settled:
        raise RuntimeError(f"the advance is not settled after {iterations} iterations")
    return Search(start=start, decisions=decisions, iterations=iterations)
