"""`"advance": "auto"`: Algorithm 1 of the paper (section 4.2) in a running job.

The ranks decide together, at the end of a turn of some iterations: they gather the times that each has measured, so that all
take the same decision. A schedule holds for all stages or for none: a stage that runs further ahead than the one before can feed
would wait forever. At that meeting all ranks have returned from iteration t and none has begun t + 2, which is the first with the
new one.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from avgpipe_ds.announce import announce
from avgpipe_ds.errors import AgreedError, AvgPipeError
from avgpipe_ds.execution.stage import Stage
from avgpipe_ds.memory.breakdown import Breakdown
from avgpipe_ds.schedules.deepspeed_schedules import AdvanceForwardSchedule, PlannedSchedule
from avgpipe_ds.schedules.plans import largest_advance, most_stored
from avgpipe_ds.tuning.advance_search import AdvanceSearch, Decision

__all__ = ["AdaptiveAdvance"]

_TURN = 4
"""Iterations whose times count in a turn."""
_CHANGING = 2
"""Iterations before them: the one that was under way when the advance changed, and the first with the new one."""
_GB = 1e9


class AdaptiveAdvance:
    """The advance of every iteration, raised for as long as that makes them faster and memory allows it.

    Args:
        stage: of this rank.
        memory_of: bytes that this stage needs, by the micro-batches of all pipelines that it stores.
        memory_limit_gb: of every accelerator; None for no limit.

    Attributes:
        decisions: what was decided so far, the same on all ranks.

    """

    def __init__(self, stage: Stage, memory_of: Callable[[int], Breakdown], memory_limit_gb: float | None) -> None:
        self._stage = stage
        self._memory_of = memory_of
        self._limit_gb = memory_limit_gb
        self._largest = largest_advance(num_stages=stage.topology.num_stages, num_micro_batches=stage.num_micro_batches)
        self._search = AdvanceSearch(max_advance=self._largest)
        self.decisions: list[Decision] = []
        self._advance = 0  # of iterations from `_from` on
        self._earlier = 0  # of those before
        self._from = 0
        self._seconds: list[float] = []

    @property
    def advance(self) -> int:
        """What iterations that have not begun will have."""
        return self._advance

    @property
    def settled(self) -> bool:
        """Whether it stays."""
        return self._search.settled

    def schedule(self, iteration: int) -> PlannedSchedule:
        """The instructions of an iteration."""
        return self._schedule_with(self._advance if iteration >= self._from else self._earlier)

    def trained(self, iteration: int, seconds: float) -> None:
        """An iteration took `seconds`. Every rank calls it after each, with its own time.

        Raises:
            AgreedError: on every rank, with an `AvgPipeError`, if not even 1F1B keeps within the memory limit.

        """
        if self.settled:
            return
        self._seconds.append(seconds)
        if len(self._seconds) < _CHANGING + _TURN:
            return
        topology = self._stage.topology
        advance = self._search.advance
        mine = (self._seconds[_CHANGING:], (self._needed_gb(advance), self._needed_gb(advance + 1)))
        self._seconds = []
        everybody = self._stage.rendezvous.gather(("advance", iteration), topology.world_ranks, mine)
        decision = self._limited([needs for _, needs in everybody])
        if decision is None:
            by_iteration = zip(*(times for times, _ in everybody), strict=True)
            decision = self._search.observe([statistics.fmean(times) for times in by_iteration])
        if self._search.running != self._advance:
            self._earlier, self._advance, self._from = self._advance, self._search.running, iteration + 2
        if decision is None:
            return
        self.decisions.append(decision)
        if topology.rank == topology.world_ranks[0]:
            announce(f"{decision.reason}{': it stays' if decision.settled else ''}")

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"advance": self._search.advance, "settled": self._search.settled}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue as it was: settled, or with the search from the same advance."""
        self._search = AdvanceSearch(max_advance=self._largest, advance=state["advance"], settled=state["settled"])
        self.restart()

    def restart(self) -> None:
        """What was under way is given up; no iteration has begun."""
        self._search.restart()
        self._advance = self._earlier = self._search.running
        self._from = 0
        self._seconds = []

    def _schedule_with(self, advance: int) -> PlannedSchedule:
        topology = self._stage.topology
        return AdvanceForwardSchedule(self._stage.num_micro_batches, topology.num_stages, topology.stage_id, advance=advance)

    def _needed_gb(self, advance: int) -> float:
        stored = most_stored(self._schedule_with(advance).plans, self._stage.num_pipelines)
        return self._memory_of(stored[self._stage.topology.stage_id]).total / _GB

    def _limited(self, needs_gb: list[tuple[float, float]]) -> Decision | None:
        """What the memory limit says, if it does: by stage, what the present advance and one more need."""
        if self._limit_gb is None:
            return None
        (now_gb, now_rank), (more_gb, more_rank) = (
            max((needs[which], rank) for rank, needs in zip(self._stage.topology.world_ranks, needs_gb, strict=True))
            for which in (0, 1)
        )
        if now_gb > self._limit_gb:
            raise AgreedError(
                AvgPipeError(
                    f"advance {self._search.advance} needs {now_gb:.4g} GB on rank {now_rank}, avgpipe.memory_limit_gb is"
                    f" {self._limit_gb:.4g}: raise the limit, make micro-batches smaller, or train fewer pipelines"
                )
            )
        if more_gb > self._limit_gb:
            return self._search.refuse(
                f"advance {self._search.advance + 1} needs {more_gb:.4g} GB on rank {more_rank},"
                f" avgpipe.memory_limit_gb is {self._limit_gb:.4g}"
            )
        return None
