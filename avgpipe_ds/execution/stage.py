"""What the pipelines of one rank share: its place in the job, and the order in which they step.

A rank is stage k of every pipeline. The pipelines meet in two rules only, both kept here:

- steps come in one order, (iteration, pipeline), on every rank. So two ranks can never wait in two different collectives, and
  the reference adds up local updates in the same order in every run;
- nothing after the last backward of iteration t+1 happens before `train_batch(t)` has returned. So whenever user code runs, the
  state is exactly "after t iterations" and no collective is pending; what is in flight are forwards, backwards and their
  messages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from avgpipe_ds.data_feed import DataFeed
from avgpipe_ds.execution.mailbox import Mailbox
from avgpipe_ds.execution.rendezvous import Rendezvous
from avgpipe_ds.memory.activations import ActivationMeter
from avgpipe_ds.tracing.recorder import Recorder

__all__ = ["Stage", "Topology"]


@dataclass(frozen=True, slots=True)
class Topology:
    """Where this rank is.

    Attributes:
        rank: global rank.
        num_stages, stage_id: K and k.
        pipeline_ranks: the ranks of this replica's stages 0 .. K-1.
        replica_ranks: the ranks that hold stage k of the data-parallel replicas.
        world_ranks: all ranks.
        data_ranks: the ranks that take data: first and last stage of every replica.

    """

    rank: int
    num_stages: int
    stage_id: int
    pipeline_ranks: tuple[int, ...]
    replica_ranks: tuple[int, ...]
    world_ranks: tuple[int, ...]
    data_ranks: tuple[int, ...]

    @property
    def is_first(self) -> bool:
        """Whether this is the stage that takes inputs."""
        return self.stage_id == 0

    @property
    def is_last(self) -> bool:
        """Whether this is the stage that takes labels and computes the loss."""
        return self.stage_id == self.num_stages - 1

    @property
    def takes_data(self) -> bool:
        """Whether this rank pulls from the data iterator."""
        return self.is_first or self.is_last

    @property
    def previous_rank(self) -> int:
        """Rank of stage k-1; there must be one."""
        return self.pipeline_ranks[self.stage_id - 1]

    @property
    def next_rank(self) -> int:
        """Rank of stage k+1; there must be one."""
        return self.pipeline_ranks[self.stage_id + 1]


@dataclass(slots=True)
class Stage:
    """The shared state of a rank's pipelines.

    Attributes:
        num_pipelines, num_micro_batches: N and M.
        recorder: of timelines.
        activations: measures what forwards leave for backwards.
        capture: told the inputs and labels of every forward, while somebody wants them.
        training: the iteration that `train_batch` works on, or worked on last; -1 before the first.
        stepped: how many pipelines have stepped in it.
        last: the iteration after which nothing may run ahead; None for no such.

    """

    topology: Topology
    device: torch.device
    mailbox: Mailbox
    rendezvous: Rendezvous
    feed: DataFeed
    num_pipelines: int
    num_micro_batches: int
    recorder: Recorder
    activations: ActivationMeter
    capture: Callable[[Any, Any], None] | None = None
    training: int = -1
    stepped: int = 0
    last: int | None = None

    def begin(self, iteration: int) -> None:
        """`train_batch` begins an iteration."""
        self.training, self.stepped = iteration, 0

    def end_without_data(self) -> None:
        """The iteration that was begun has no data: as before it."""
        self.training, self.stepped = self.training - 1, self.num_pipelines

    def may_begin(self, iteration: int) -> bool:
        """Whether a pipeline may start computing for `iteration`."""
        return self.last is None or iteration <= self.last

    def may_finish(self, iteration: int) -> bool:
        """Whether a pipeline may go beyond its last backward of `iteration`."""
        return iteration <= self.training

    def may_step(self, iteration: int, pipeline_id: int) -> bool:
        """Whether it is this pipeline's turn to step."""
        return iteration == self.training and pipeline_id == self.stepped

    @property
    def iteration_complete(self) -> bool:
        """Whether all pipelines have stepped."""
        return self.stepped == self.num_pipelines
