"""Each pipeline draws from a stream of its own."""

from __future__ import annotations

import torch

from avgpipe_ds.random_state import RandomState

CPU = torch.device("cpu")


def draw(state: RandomState) -> float:
    with state.active():
        return float(torch.rand(()))


def test_stream_zero_continues_the_generator() -> None:
    torch.manual_seed(5)
    state = RandomState(CPU, 0)
    expected = [float(torch.rand(())) for _ in range(3)]
    torch.manual_seed(99)
    assert [draw(state) for _ in range(3)] == expected


def test_streams_differ_and_repeat_with_the_seed() -> None:
    draws = []
    for _ in range(2):
        torch.manual_seed(5)
        draws.append([draw(RandomState(CPU, stream)) for stream in range(8)])
    assert draws[0] == draws[1]
    assert len(set(draws[0])) == 8
    torch.manual_seed(6)
    assert not set(draws[0]) & {draw(RandomState(CPU, stream)) for stream in range(8)}


def test_order_of_use_does_not_matter_and_the_outside_sees_nothing() -> None:
    def all_draws(order: list[int]) -> tuple[dict[int, list[float]], float]:
        torch.manual_seed(5)
        states = [RandomState(CPU, stream) for stream in range(3)]
        draws: dict[int, list[float]] = {0: [], 1: [], 2: []}
        for stream in order:
            draws[stream].append(draw(states[stream]))
        return draws, float(torch.rand(()))

    assert all_draws([0, 1, 2, 0, 1, 2]) == all_draws([2, 2, 1, 0, 1, 0])


def test_an_exception_inside_still_restores_the_outside() -> None:
    state = RandomState(CPU, 1)
    before = torch.get_rng_state()
    try:
        with state.active():
            torch.rand(3)
            raise ValueError
    except ValueError:
        pass
    assert torch.equal(before, torch.get_rng_state())


def test_a_saved_state_continues() -> None:
    state = RandomState(CPU, 1)
    draw(state)
    saved = state.state_dict()
    expected = [draw(state) for _ in range(3)]
    other = RandomState(CPU, 2)
    other.load_state_dict(saved)
    assert [draw(other) for _ in range(3)] == expected
