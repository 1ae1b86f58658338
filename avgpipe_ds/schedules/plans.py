"""Compute plans: the order in which one stage computes the micro-batches of one batch.

All three schedules are one rule with one number, the length of the warm-up (paper, section 4). A stage first runs `warm`
forwards, then one forward and one backward in turn for as long as there are forwards, then the remaining backwards:

    1f1b              warm = min(M, K - 1 - k)                1 longer than that of the next stage
    advance_forward   warm = min(M, (K - 1 - k) * (1 + a))    1 + a longer: a forwards further ahead of the next stage
    gpipe             warm = M                                all forwards, then all backwards

The last stage has no next one to run ahead of, so `advance_forward` leaves it at 1F1B. K = 2, M = 4 (A: a forward before the
first backward that 1F1B would run after it):

    stage 0   1f1b       F0 F1 B0 F2 B1 F3 B2 B3
              advance 1  F0 F1 A2 B0 F3 B1 B2 B3
              gpipe      F0 F1 A2 A3 B0 B1 B2 B3
    stage 1   1f1b       F0 B0 F1 B1 F2 B2 F3 B3
              advance 1  F0 B0 F1 B1 F2 B2 F3 B3
              gpipe      F0 A1 A2 A3 B0 B1 B2 B3

Stage k keeps the activations of min(M, warm + 1) micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence

from avgpipe_ds.schedules.actions import Action

__all__ = [
    "SCHEDULE_NAMES",
    "Plan",
    "forward_only_plan",
    "largest_advance",
    "most_stored",
    "peak_stored",
    "plan",
    "plan_all_stages",
]

Plan = tuple[Action, ...]
"""What one stage computes for one batch, in order."""

SCHEDULE_NAMES = ("1f1b", "gpipe", "advance_forward")


def plan(name: str, *, num_stages: int, num_micro_batches: int, stage_id: int, advance: int = 0) -> Plan:
    """The compute plan of one stage.

    Args:
        name: "1f1b", "gpipe" or "advance_forward".
        num_stages: K, at least 1.
        num_micro_batches: M, at least 1; may be smaller than K.
        stage_id: k, 0 .. K-1.
        advance: a, forwards further ahead of the next stage than in 1F1B; only with "advance_forward", 0 is 1F1B.

    Raises:
        ValueError: an argument is out of range, or `name` does not go with `advance`.

    """
    _check_ranges(num_stages=num_stages, num_micro_batches=num_micro_batches, stage_id=stage_id)
    if name not in SCHEDULE_NAMES:
        raise ValueError(f"schedule must be one of {', '.join(SCHEDULE_NAMES)}; got {name!r}")
    if advance < 0:
        raise ValueError(f"advance must be at least 0, got {advance}")
    if advance > 0 and name != "advance_forward":
        raise ValueError(f'advance must be 0 with schedule "{name}", got {advance}; use "advance_forward"')

    warm_1f1b = num_stages - 1 - stage_id
    warm = num_micro_batches if name == "gpipe" else min(num_micro_batches, warm_1f1b * (1 + advance))

    def forward(micro_batch: int) -> Action:
        # Forward `warm` still precedes the first backward: 1F1B starts its alternation with a forward, too.
        return Action(kind="F", micro_batch=micro_batch, advanced=warm_1f1b < micro_batch <= warm)

    actions = [forward(micro_batch) for micro_batch in range(warm)]
    for micro_batch in range(num_micro_batches):
        if warm + micro_batch < num_micro_batches:
            actions.append(forward(warm + micro_batch))
        actions.append(Action(kind="B", micro_batch=micro_batch))
    return tuple(actions)


def plan_all_stages(name: str, *, num_stages: int, num_micro_batches: int, advance: int = 0) -> tuple[Plan, ...]:
    """`plan` of every stage, stage 0 first: what `simulate.validate` and `simulate.simulate` take.

    Raises:
        ValueError: as `plan`.

    """
    _check_ranges(num_stages=num_stages, num_micro_batches=num_micro_batches, stage_id=0)
    return tuple(
        plan(name, num_stages=num_stages, num_micro_batches=num_micro_batches, stage_id=stage_id, advance=advance)
        for stage_id in range(num_stages)
    )


def largest_advance(*, num_stages: int, num_micro_batches: int) -> int:
    """The largest advance that changes anything.

    With M - 2 all stages but the last run all their forwards before their first backward; one stage has nothing to run ahead of.
    """
    return 0 if num_stages == 1 else max(0, num_micro_batches - 2)


def forward_only_plan(*, num_micro_batches: int) -> Plan:
    """The plan of every stage in evaluation: all forwards in order.

    Raises:
        ValueError: `num_micro_batches` is below 1.

    """
    _check_ranges(num_stages=1, num_micro_batches=num_micro_batches, stage_id=0)
    return tuple(Action(kind="F", micro_batch=micro_batch) for micro_batch in range(num_micro_batches))


def peak_stored(actions: Sequence[Action]) -> int:
    """The most micro-batches that were forwarded and not yet backwarded at one time."""
    stored = peak = 0
    for action in actions:
        stored += 1 if action.kind == "F" else -1
        peak = max(peak, stored)
    return peak


def most_stored(plans: Sequence[Plan], num_pipelines: int) -> tuple[int, ...]:
    """By stage, a bound of the micro-batches that N pipelines together store: all at their most, however they interleave.

    On the last stage a backward needs no message and goes before all forwards. So where it follows its forward, as in 1F1B, the
    bound is 1.
    """
    peaks = [peak_stored(actions) for actions in plans]
    return tuple(num_pipelines * peak for peak in peaks[:-1]) + (1 if peaks[-1] == 1 else num_pipelines * peaks[-1],)


def _check_ranges(*, num_stages: int, num_micro_batches: int, stage_id: int) -> None:
    if num_stages < 1:
        raise ValueError(f"num_stages must be at least 1, got {num_stages}")
    if num_micro_batches < 1:
        raise ValueError(f"num_micro_batches must be at least 1, got {num_micro_batches}")
    if not 0 <= stage_id < num_stages:
        raise ValueError(f"stage_id must be in 0 .. {num_stages - 1} with {num_stages} stages, got {stage_id}")
