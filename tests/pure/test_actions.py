from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from avgpipe_ds.schedules.actions import Action

kinds = st.sampled_from([("F", False), ("F", True), ("B", False)])


@pytest.mark.parametrize(
    "text, action",
    [
        ("F0", Action(kind="F", micro_batch=0)),
        ("B12", Action(kind="B", micro_batch=12)),
        ("A3", Action(kind="F", micro_batch=3, advanced=True)),
    ],
)
def test_text_form(text, action):
    assert str(action) == text
    assert Action.parse(text) == action


@given(kinds, st.integers(0, 10**6))
def test_parse_is_the_inverse_of_str(kind, micro_batch):
    action = Action(kind=kind[0], micro_batch=micro_batch, advanced=kind[1])
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize("text", ["", "F", "0", "F-1", "F01", "f0", "X0", "F0 ", "F0\n", "F1.5", "F٣"])
def test_parse_rejects(text):
    with pytest.raises(ValueError, match="expected an action"):
        Action.parse(text)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"kind": "F", "micro_batch": -1}, "at least 0, got -1"),
        ({"kind": "B", "micro_batch": 2, "advanced": True}, "only a forward"),
        ({"kind": "X", "micro_batch": 0}, "got 'X'"),
    ],
)
def test_impossible_actions_are_rejected(fields, message):
    with pytest.raises(ValueError, match=message):
        Action(**fields)


def test_actions_are_immutable_and_hashable():
    action = Action(kind="F", micro_batch=0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        action.micro_batch = 1
    assert {action: 1}[Action.parse("F0")] == 1
