"""Checks plans before they run, and predicts how N pipelines over the same stages will run.

The simulator follows the executor's rules: a stage does one thing at a time; a computation can start when the message that
it needs has arrived; among those that can start, `priority` chooses; optimizer steps go before all computation and are taken in
the order (iteration, pipeline), so that no pipeline steps iteration t+1 before all have stepped t; beyond that pipelines never
wait for each other.

Time is counted in whole nanoseconds inside: sums of floats would break ties by their rounding errors.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

from avgpipe_ds.errors import ScheduleError
from avgpipe_ds.schedules.actions import Action, Kind
from avgpipe_ds.schedules.costs import StageCosts
from avgpipe_ds.schedules.plans import Plan, peak_stored
from avgpipe_ds.schedules.priority import priority as default_priority
from avgpipe_ds.schedules.timetable import plan_grid, time_grid
from avgpipe_ds.schedules.validate import validate

__all__ = ["Event", "Simulation", "simulate", "timetable", "validate"]

_NS_PER_S = 1_000_000_000
_UNIFORM = StageCosts()
Priority = Callable[..., tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One computation: `action` of one pipeline on one stage, from `start_s` to `end_s` (seconds)."""

    stage_id: int
    pipeline_id: int
    iteration: int
    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What `simulate` found.

    Attributes:
        num_stages: K.
        num_pipelines: N.
        num_iterations: how many were simulated.
        makespan_s: from the start of the first computation to the end of the last.
        seconds_per_iteration: in steady state. An iteration is one batch of each of the N pipelines.
        busy_fraction: per stage, the part of the steady state that it computes.
        peak_stored: per stage, the most micro-batches of one pipeline whose activations are kept at a time.
        peak_together: per stage, the most of all pipelines together; they are seldom all at their most.
        events: every computation, in order of start; optimizer steps are not among them.

    """

    num_stages: int
    num_pipelines: int
    num_iterations: int
    makespan_s: float
    seconds_per_iteration: float
    busy_fraction: tuple[float, ...]
    peak_stored: tuple[int, ...]
    peak_together: tuple[int, ...]
    events: tuple[Event, ...]


def simulate(
    plans: Sequence[Plan],
    costs: StageCosts | Sequence[StageCosts] = _UNIFORM,
    *,
    num_pipelines: int = 1,
    num_iterations: int = 16,
    barrier: bool = False,
    blocking_sends: bool = False,
    shared_links: bool = False,
    clipping: bool = False,
    variation: float = 0.0,
    seed: int = 0,
    priority: Priority = default_priority,
) -> Simulation:
    """Run `num_pipelines` pipelines through the same plans.

    Args:
        plans: one plan per stage, the same for every pipeline; valid ones, see `validate`.
        costs: seconds of each stage, or of all.
        num_pipelines: N.
        num_iterations: 3 or more give figures of the steady state: those of the first quarter and of the last are left out.
        barrier: on every stage all pipelines wait for each other at the end of an iteration.
        blocking_sends: a stage computes nothing while it sends.
        shared_links: the messages of one direction of a link go one after the other, as where its bandwidth is what takes the
            time; otherwise they do not disturb each other.
        clipping: a step waits until all stages have done the backwards of its batch, for the norm of all gradients.
        variation: standard deviation of the time of a computation, as a part of it; the negative one draws the opposite. With
            times that never vary, pipelines can lock into a pattern that no real ones keep.
        seed: of the variation. What a computation draws does not depend on anything that happens.
        priority: the executor's, or another one to compare it with.

    Raises:
        ScheduleError: the plans deadlock; with the timetable and what each stage waits for.
        ValueError: a number is out of range.

    """
    if num_pipelines < 1 or num_iterations < 1:
        raise ValueError(f"expected at least 1 pipeline and 1 iteration, got {num_pipelines} and {num_iterations}")
    per_stage = [costs] * len(plans) if isinstance(costs, StageCosts) else list(costs)
    if len(per_stage) != len(plans):
        raise ValueError(f"expected costs of {len(plans)} stages, got {len(per_stage)}")
    run = _Run(
        plans=plans,
        costs_ns=[_CostsNs.of(stage) for stage in per_stage],
        num_pipelines=num_pipelines,
        num_iterations=num_iterations,
        barrier=barrier,
        blocking_sends=blocking_sends,
        shared_links=shared_links,
        clipping=clipping,
        variation=variation,
        seed=seed,
        priority=priority,
    )
    run.run()
    start_s, end_s, iterations = _steady_window(run.events, num_iterations)
    return Simulation(
        num_stages=len(plans),
        num_pipelines=num_pipelines,
        num_iterations=num_iterations,
        makespan_s=max((event.end_s for event in run.events), default=0.0),
        seconds_per_iteration=(end_s - start_s) / iterations,
        busy_fraction=tuple(_busy_fraction(run.events, stage_id, start_s, end_s) for stage_id in range(len(plans))),
        peak_stored=tuple(peak_stored(actions) for actions in plans),
        peak_together=tuple(_peak_together(run.events, stage_id) for stage_id in range(len(plans))),
        events=tuple(run.events),
    )


def timetable(schedule: Simulation | Sequence[Plan]) -> str:
    """A text picture, one row per stage: of a simulation over time, of bare plans in order."""
    if isinstance(schedule, Simulation):
        return time_grid(schedule.events, num_stages=schedule.num_stages)
    return plan_grid(schedule)


@dataclass(frozen=True, slots=True)
class _CostsNs:
    """A stage's costs in whole nanoseconds; those of messages by what was computed before them."""

    compute: dict[Kind, int]
    message: dict[Kind, int]
    step: int

    @classmethod
    def of(cls, costs: StageCosts) -> _CostsNs:
        def ns(seconds: float) -> int:
            return round(seconds * _NS_PER_S)

        return cls(
            compute={"F": max(1, ns(costs.forward_s)), "B": max(1, ns(costs.backward_s))},
            message={"F": ns(costs.activation_s), "B": ns(costs.gradient_s)},
            step=ns(costs.step_s),
        )


@dataclass(slots=True)
class _Stream:
    """Where one pipeline stands on one stage: the next action is `plan[position]` of the batch of `iteration`."""

    random: Random
    iteration: int = 0
    position: int = 0


class _Run:
    """The state of one simulation. Every stage looks for work when it becomes free and when a message arrives."""

    def __init__(
        self,
        *,
        plans: Sequence[Plan],
        costs_ns: Sequence[_CostsNs],
        num_pipelines: int,
        num_iterations: int,
        barrier: bool,
        blocking_sends: bool,
        shared_links: bool,
        clipping: bool,
        variation: float,
        seed: int,
        priority: Priority,
    ) -> None:
        self.plans = plans
        self.costs_ns = costs_ns
        self.num_pipelines = num_pipelines
        self.num_iterations = num_iterations
        self.barrier = barrier
        self.blocking_sends = blocking_sends
        self.shared_links = shared_links
        self.clipping = clipping
        self.priority = priority
        self.variation = variation
        # One generator for each stream, whose plan is fixed: so what a computation draws does not depend on what went before it.
        self.streams = [
            [_Stream(Random(f"{seed}/{stage_id}/{pipeline_id}")) for pipeline_id in range(num_pipelines)]
            for stage_id in range(len(plans))
        ]
        self.steps_taken = [0] * len(plans)
        self.free_ns = [0] * len(plans)
        self.link_free_ns: dict[tuple[int, int], int] = {}
        self.computed_ns: dict[tuple[int, int], list[int]] = {}
        self.arrival_ns: dict[tuple[int, int, int, Kind, int], int] = {}
        self.wakeups = [(0, stage_id) for stage_id in range(len(plans))]
        self.events: list[Event] = []

    def run(self) -> None:
        """Simulate until nothing can happen any more."""
        while self.wakeups:
            now, stage_id = heapq.heappop(self.wakeups)
            if now < self.free_ns[stage_id]:
                continue  # it will wake up when it is free
            if self._take_steps(stage_id, now):
                continue
            runnable = list(self._runnable(stage_id, now))
            if runnable:
                _, pipeline_id = min(runnable)
                self._compute(stage_id, pipeline_id, now)
        if any(stream.iteration < self.num_iterations for streams in self.streams for stream in streams):
            raise ScheduleError(self._deadlock_text())

    def _take_steps(self, stage_id: int, now: int) -> bool:
        """Take the optimizer steps that are due, in the order (iteration, pipeline); whether they take time."""
        while True:
            iteration, pipeline_id = divmod(self.steps_taken[stage_id], self.num_pipelines)
            stream = self.streams[stage_id][pipeline_id]
            if stream.iteration >= self.num_iterations or stream.position < len(self.plans[stage_id]):
                return False
            if self.clipping and not self._computed_everywhere((iteration, pipeline_id), now):
                return False
            stream.iteration, stream.position = iteration + 1, 0
            self.steps_taken[stage_id] += 1
            step_ns = self.costs_ns[stage_id].step
            if step_ns > 0:
                self._busy_until(stage_id, now + step_ns)
                return True

    def _runnable(self, stage_id: int, now: int) -> Iterator[tuple[tuple[int, ...], int]]:
        """Yield (priority, pipeline) of what could start now."""
        for pipeline_id, stream in enumerate(self.streams[stage_id]):
            if stream.iteration >= self.num_iterations or stream.position == len(self.plans[stage_id]):
                continue
            if self.barrier and self.steps_taken[stage_id] < stream.iteration * self.num_pipelines:
                continue
            action = self.plans[stage_id][stream.position]
            arrival_ns = self._arrival_ns(stage_id, pipeline_id, stream.iteration, action)
            if arrival_ns is not None and arrival_ns <= now:
                key = self.priority(iteration=stream.iteration, pipeline_id=pipeline_id, kind=action.kind)
                yield key, pipeline_id

    def _arrival_ns(self, stage_id: int, pipeline_id: int, iteration: int, action: Action) -> int | None:
        """When the message that `action` needs arrives; None while that is unknown, 0 if it needs none."""
        source = _neighbour(stage_id, action.kind, -1, len(self.plans))
        if source is None:
            return 0
        return self.arrival_ns.get((source, pipeline_id, iteration, action.kind, action.micro_batch))

    def _compute(self, stage_id: int, pipeline_id: int, now: int) -> None:
        """Compute the next action of a pipeline, and send its result on."""
        stream = self.streams[stage_id][pipeline_id]
        action = self.plans[stage_id][stream.position]
        end = free = now + self._duration_ns(stage_id, stream, action.kind)
        target = _neighbour(stage_id, action.kind, +1, len(self.plans))
        if target is not None:
            arrival = self._send(stage_id, target, action.kind, end)
            self.arrival_ns[stage_id, pipeline_id, stream.iteration, action.kind, action.micro_batch] = arrival
            free = arrival if self.blocking_sends else end
        self._busy_until(stage_id, free)
        self.events.append(
            Event(
                stage_id=stage_id,
                pipeline_id=pipeline_id,
                iteration=stream.iteration,
                action=action,
                start_s=now / _NS_PER_S,
                end_s=end / _NS_PER_S,
            )
        )
        stream.position += 1
        if stream.position == len(self.plans[stage_id]):
            ends = self.computed_ns.setdefault((stream.iteration, pipeline_id), [])
            ends.append(end)
            if self.clipping and len(ends) == len(self.plans):
                for other in range(len(self.plans)):
                    heapq.heappush(self.wakeups, (max(ends), other))

    def _duration_ns(self, stage_id: int, stream: _Stream, kind: Kind) -> int:
        mean = self.costs_ns[stage_id].compute[kind]
        return max(1, round(mean * stream.random.gauss(1.0, self.variation))) if self.variation else mean

    def _computed_everywhere(self, batch: tuple[int, int], now: int) -> bool:
        ends = self.computed_ns.get(batch, [])
        return len(ends) == len(self.plans) and max(ends) <= now

    def _send(self, source: int, target: int, kind: Kind, ready: int) -> int:
        """When a message that is ready at `ready` arrives at its target, which is to look for work then."""
        start = max(ready, self.link_free_ns.get((source, target), 0)) if self.shared_links else ready
        arrival = start + self.costs_ns[source].message[kind]
        self.link_free_ns[source, target] = arrival
        heapq.heappush(self.wakeups, (arrival, target))
        return arrival

    def _busy_until(self, stage_id: int, end: int) -> None:
        self.free_ns[stage_id] = end
        heapq.heappush(self.wakeups, (end, stage_id))

    def _deadlock_text(self) -> str:
        """What each stage waits for, and where."""
        lines: list[str] = []
        marks: dict[int, int] = {}
        for stage_id, streams in enumerate(self.streams):
            for pipeline_id, stream in enumerate(streams):
                if stream.iteration < self.num_iterations and stream.position < len(self.plans[stage_id]):
                    action = self.plans[stage_id][stream.position]
                    source = _neighbour(stage_id, action.kind, -1, len(self.plans))
                    marks.setdefault(stage_id, stream.position)
                    lines.append(f"pipeline {pipeline_id}: stage {stage_id} at {action} waits for stage {source}")
        return "\n".join(["the schedule deadlocks", *lines, plan_grid(self.plans, marks=marks)])


def _neighbour(stage_id: int, kind: Kind, direction: int, num_stages: int) -> int | None:
    """The stage that a forward (backward) gets its input from, direction -1, or sends its result to, +1; None at the ends."""
    neighbour = stage_id + (direction if kind == "F" else -direction)
    return neighbour if 0 <= neighbour < num_stages else None


def _steady_window(events: Sequence[Event], num_iterations: int) -> tuple[float, float, int]:
    """(start, end, iterations between) of the steady state; a run too short to have one counts as a whole."""
    finished_s = [0.0] * num_iterations
    for event in events:
        finished_s[event.iteration] = max(finished_s[event.iteration], event.end_s)
    first, last = num_iterations // 4, num_iterations - 2
    if last <= first:
        return 0.0, finished_s[-1], num_iterations
    return finished_s[first], finished_s[last], last - first


def _peak_together(events: Sequence[Event], stage_id: int) -> int:
    """From the start of a forward to the end of its backward a micro-batch is kept; a stage computes one thing at a time."""
    return peak_stored([event.action for event in events if event.stage_id == stage_id])


def _busy_fraction(events: Sequence[Event], stage_id: int, start_s: float, end_s: float) -> float:
    overlaps = (min(event.end_s, end_s) - max(event.start_s, start_s) for event in events if event.stage_id == stage_id)
    return sum(max(0.0, overlap) for overlap in overlaps) / (end_s - start_s)
