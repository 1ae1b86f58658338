"""Each contender's own M: a short measurement of a few, and the best of them that fits into memory."""

from collections.abc import Callable
from dataclasses import dataclass

from avgpipe_ds.memory.breakdown import largest
from bench.contenders.base import Contender
from bench.measure import Measured
from bench.workload import Workload

__all__ = ["Choice", "Trial", "fixed_choice", "search"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """An M that was tried, or why it was not.

    Attributes:
        num_micro_batches: M.
        seconds: per B samples; None if it was not tried.
        memory_bytes: on the rank that needs most; None if it was not tried.
        note: why it was not tried or can't be taken; empty otherwise.
    """

    num_micro_batches: int
    seconds: float | None = None
    memory_bytes: int | None = None
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The M that a contender competes with.

    Attributes:
        num_micro_batches: M; None if the contender is left out.
        trials: what was tried; empty for an M that was given.
        reason: why it is left out; empty otherwise.
    """

    num_micro_batches: int | None
    trials: tuple[Trial, ...] = ()
    reason: str = ""


def fixed_choice(contender: Contender, workload: Workload, num_micro_batches: int) -> Choice:
    """The M that everyone is to use, or why this contender can't."""
    own = contender.fixed(num_micro_batches)
    reason = contender.problem(workload, own)
    return Choice(num_micro_batches=None if reason else own, reason=reason or "")


def search(
    contender: Contender, workload: Workload, measure: Callable[[int], Measured], *, memory_limit_bytes: int | None
) -> Choice:
    """Measure the contender's candidates, and choose the fastest that fits.

    A candidate whose computation alone takes longer than another's whole batch is not measured.

    Args:
        contender: whose M.
        workload: what is to be trained.
        measure: takes M.
        memory_limit_bytes: for every rank; None for no limit.
    """
    trials: list[Trial] = []
    best: tuple[float, int] | None = None
    for number in contender.candidates(workload):
        compute_s = contender.compute_s(workload, number) if workload.mode == "emulated" else 0.0
        if best is not None and compute_s >= best[0]:
            note = f"computation alone takes {compute_s:.3f} s, M = {best[1]} took {best[0]:.3f} s"
            trials.append(Trial(num_micro_batches=number, note=note))
            continue
        found = measure(number)
        memory_bytes = largest(found.memory)
        too_much = memory_limit_bytes is not None and memory_bytes > memory_limit_bytes
        note = "more than the memory limit" if too_much else ""
        trials.append(Trial(num_micro_batches=number, seconds=found.seconds, memory_bytes=memory_bytes, note=note))
        if not too_much and (best is None or found.seconds < best[0]):
            best = found.seconds, number
    if best is None:
        return Choice(num_micro_batches=None, trials=tuple(trials), reason=_why_none(trials, workload))
    return Choice(num_micro_batches=best[1], trials=tuple(trials))


def _why_none(trials: list[Trial], workload: Workload) -> str:
    if not trials:
        return f"no M divides a batch of {workload.batch} samples over K = {workload.num_stages} in a way that it can train"
    least = min(trials, key=lambda trial: trial.memory_bytes or 0)
    return f"needs {(least.memory_bytes or 0) / 1e6:.2f} MB at M = {least.num_micro_batches}, more than the memory limit"
