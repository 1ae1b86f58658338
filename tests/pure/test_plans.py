"""Plans against timetables written by hand, and against the properties that docs/schedules.md states."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from avgpipe_ds.schedules.plans import forward_only_plan, peak_stored, plan, plan_all_stages

GOLDEN = {
    ("1f1b", 2, 4, 0): ["F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"],
    ("advance_forward", 2, 4, 1): ["F0 F1 A2 B0 F3 B1 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"],
    ("advance_forward", 2, 4, 2): ["F0 F1 A2 A3 B0 B1 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"],
    # each stage stores two more than the next one
    ("advance_forward", 3, 6, 1): [
        "F0 F1 F2 A3 A4 B0 F5 B1 B2 B3 B4 B5",
        "F0 F1 A2 B0 F3 B1 F4 B2 F5 B3 B4 B5",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5",
    ],
    ("gpipe", 2, 4, 0): ["F0 F1 A2 A3 B0 B1 B2 B3", "F0 A1 A2 A3 B0 B1 B2 B3"],
    ("1f1b", 4, 4, 0): [
        "F0 F1 F2 F3 B0 B1 B2 B3",
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ],
    # fewer micro-batches than stages: the first stages never reach the alternation
    ("1f1b", 4, 2, 0): ["F0 F1 B0 B1", "F0 F1 B0 B1", "F0 F1 B0 B1", "F0 B0 F1 B1"],
    ("1f1b", 1, 3, 0): ["F0 B0 F1 B1 F2 B2"],
    ("advance_forward", 1, 3, 1): ["F0 B0 F1 B1 F2 B2"],
    ("gpipe", 1, 3, 0): ["F0 A1 A2 B0 B1 B2"],
    ("gpipe", 3, 1, 0): ["F0 B0", "F0 B0", "F0 B0"],
}

num_stages = st.integers(1, 6)
num_micro_batches = st.integers(1, 8)


@pytest.mark.parametrize("key", GOLDEN, ids=str)
def test_golden_plans(key):
    name, stages, micro_batches, advance = key
    plans = plan_all_stages(name, num_stages=stages, num_micro_batches=micro_batches, advance=advance)
    assert [" ".join(map(str, actions)) for actions in plans] == GOLDEN[key]


@given(num_stages, num_micro_batches, st.integers(0, 10))
def test_peak_stored_and_advanced_forwards(K, M, a):
    plans = plan_all_stages("advance_forward", num_stages=K, num_micro_batches=M, advance=a)
    for k, actions in enumerate(plans):
        assert peak_stored(actions) == min(M, (K - 1 - k) * (1 + a) + 1)
        assert sum(action.advanced for action in actions) == peak_stored(actions) - min(M, K - k), "one per extra micro-batch"


@given(num_stages, num_micro_batches, st.integers(0, 4))
def test_both_ends_of_advance(K, M, more):
    def plans(name, advance=0):
        return plan_all_stages(name, num_stages=K, num_micro_batches=M, advance=advance)

    assert plans("advance_forward", 0) == plans("1f1b")
    *before, last = plans("advance_forward", max(0, M - 2) + more)
    assert (*before,) == plans("gpipe")[:-1]
    assert last == plans("1f1b")[-1], "it has no next stage to run ahead of"
    for actions in plans("gpipe"):
        assert [action.kind for action in actions] == ["F"] * M + ["B"] * M


def test_forward_only():
    assert [str(action) for action in forward_only_plan(num_micro_batches=3)] == ["F0", "F1", "F2"]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_stages": 0}, "num_stages must be at least 1, got 0"),
        ({"num_micro_batches": 0}, "num_micro_batches must be at least 1, got 0"),
        ({"stage_id": 4}, r"0 \.\. 3 with 4 stages, got 4"),
        ({"stage_id": -1}, "got -1"),
        ({"advance": -1}, "at least 0, got -1"),
        ({"advance": 2}, 'advance must be 0 with schedule "1f1b", got 2'),
        ({"name": "gpipe", "advance": 2}, '"gpipe", got 2'),
        ({"name": "zigzag"}, "one of 1f1b, gpipe, advance_forward; got 'zigzag'"),
    ],
)
def test_bad_arguments(changes, message):
    arguments = {"name": "1f1b", "num_stages": 4, "num_micro_batches": 8, "stage_id": 0, "advance": 0} | changes
    with pytest.raises(ValueError, match=message):
        plan(arguments.pop("name"), **arguments)


def test_pure_parts_import_neither_deepspeed_nor_torch():
    modules = ["errors", "config", *(f"schedules.{name}" for name in ("actions", "plans", "priority", "simulate", "timetable"))]
    imports = ", ".join(f"avgpipe_ds.{name}" for name in modules)
    code = f"import {imports}, sys; print('deepspeed' in sys.modules, 'torch' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert printed.split() == ["False", "False"]
