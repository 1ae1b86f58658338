"""What the benchmark asks of a contender."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn

from avgpipe_ds.memory.breakdown import Breakdown
from bench.workload import Workload

__all__ = ["Contender", "Training"]


class Training(ABC):
    """A contender that has been built, on this rank. Every rank calls every method."""

    @abstractmethod
    def train_batch(self) -> Tensor | None:
        """Train one iteration. The mean over the ranks that return a loss is the loss of its batches."""

    @abstractmethod
    def parameters(self) -> Iterable[nn.Parameter]:
        """All that this rank trains, of all pipelines."""

    @abstractmethod
    def weights(self) -> dict[str, Tensor]:
        """Copies of the weights on this rank that are the result of the training, as "chunk.name"."""

    @abstractmethod
    def memory(self) -> Breakdown:
        """What lies on this rank all the time; without activations."""

    @abstractmethod
    def close(self) -> None:
        """Release threads and connections. Process groups are released by who called `build`."""


@dataclass(frozen=True, kw_only=True)
class Contender(ABC):
    """A row of the table.

    Attributes:
        key: what the command line calls it.
        name: what the table calls it.
        num_pipelines: N.
    """

    key: str
    name: str
    num_pipelines: int = 1

    @property
    def batches_per_iteration(self) -> int:
        """How many times B samples an iteration trains: N, for each pipeline has a batch."""
        return self.num_pipelines

    @abstractmethod
    def build(self, workload: Workload, num_micro_batches: int) -> Training:
        """Make it ready to train. Every rank calls it."""

    def problem(self, workload: Workload, num_micro_batches: int) -> str | None:
        """Why it can't train the workload in so many micro-batches; None if it can."""
        if workload.batch % num_micro_batches:
            return f"a batch of {workload.batch} samples can't be sliced into M = {num_micro_batches} equal micro-batches"
        return None

    def candidates(self, workload: Workload) -> list[int]:
        """The M to choose from.

        From half of K under way at a time on, since fewer leave most accelerators idle, up to micro-batches of a single sample;
        each at least twice the one before.
        """
        found: list[int] = []
        for number in range(max(1, workload.num_stages // (2 * self.num_pipelines)), workload.batch + 1):
            if self.problem(workload, number) is None and (not found or number >= 2 * found[-1]):
                found.append(number)
        return found

    def fixed(self, num_micro_batches: int) -> int:
        """The M to use when everyone is to use `num_micro_batches`."""
        return num_micro_batches

    def compute_s(self, workload: Workload, num_micro_batches: int) -> float:
        """Seconds that an emulated accelerator computes for B samples; no schedule can be faster with this M."""
        return num_micro_batches * workload.times.total_s(workload.batch / num_micro_batches)
