"""Algorithm 1 on times that are known, with the noise of real ones."""

from __future__ import annotations

import random

import pytest

from avgpipe_ds.tuning.advance_search import AdvanceSearch, Decision

LIMIT = 2000


def settle(search, seconds_of, *, chance=None, noise=0.0, drift=0.0):
    """Feed it until it settles; the decisions, and the advance of each iteration."""
    chance = chance or random.Random(0)
    decisions, ran = [], []
    while not search.settled:
        assert len(ran) < LIMIT, "it never settles"
        turn = []
        for _ in range(4):
            ran.append(search.running)
            # Skewed, as delays are: mostly little, now and then a lot.
            late = chance.expovariate(1 / noise) if noise else 0.0
            turn.append(seconds_of(search.running) * (1 + late + drift * len(ran)))
        found = search.observe(turn)
        decisions += [found] if found else []
    return decisions, ran


def test_free_messages_stay_at_zero():
    decisions, ran = settle(AdvanceSearch(max_advance=6), lambda advance: 1.0)
    assert [(one.advance, one.settled) for one in decisions] == [(0, True)]
    assert set(ran) == {0, 1}
    assert "advance 1 does not save enough" in decisions[0].reason


@pytest.mark.parametrize(("gain", "advance"), [(0.008, 0), (0.012, 1)])
def test_a_step_has_to_save_what_its_memory_is_worth(gain, advance):
    decisions, _ = settle(AdvanceSearch(max_advance=6), lambda a: 1.0 - gain * min(a, 1))
    assert decisions[-1].advance == advance


@pytest.mark.parametrize("best", [1, 2, 4])
def test_rises_to_the_best(best):
    decisions, ran = settle(AdvanceSearch(max_advance=6), lambda advance: 2.0 - 0.1 * min(advance, best))
    assert [one.advance for one in decisions] == [*range(1, best + 1), best]
    assert [one.settled for one in decisions] == [False] * best + [True]
    assert max(ran) == best + 1


def test_too_much_is_stepped_back_from():
    """Where more advance is slower, as with several pipelines it can be."""
    decisions, _ = settle(AdvanceSearch(max_advance=6), lambda advance: 1.0 + 0.2 * abs(advance - 1))
    assert decisions[-1] == Decision(advance=1, settled=True, reason=decisions[-1].reason)


@pytest.mark.parametrize("noise", [0.01, 0.05])
@pytest.mark.parametrize("drift", [0.0, 0.001, -0.001])
def test_noise_does_not_decide(noise, drift):
    flat = [
        settle(AdvanceSearch(max_advance=6), lambda a: 1.0, chance=random.Random(i), noise=noise, drift=drift) for i in range(60)
    ]
    assert sum(decisions[-1].advance > 0 for decisions, _ in flat) <= 2
    useful = [
        settle(AdvanceSearch(max_advance=6), lambda a: 1.0 - 0.15 * min(a, 2), chance=random.Random(i), noise=noise, drift=drift)
        for i in range(60)
    ]
    assert all(1 <= decisions[-1].advance <= 3 for decisions, _ in useful)
    assert sum(decisions[-1].advance == 2 for decisions, _ in useful) >= 54


def test_settled_is_settled():
    search = AdvanceSearch(max_advance=2)
    settle(search, lambda advance: 1.0)
    assert search.observe([0.1]) is None and search.running == 0


def test_the_largest_advance_ends_it():
    decisions, _ = settle(AdvanceSearch(max_advance=1), lambda advance: 1.0 - 0.3 * advance)
    assert decisions[-1].advance == 1 and "largest" in decisions[-1].reason
    assert settle(AdvanceSearch(max_advance=0), lambda advance: 1.0)[0][-1].advance == 0


def test_memory_ends_it():
    search = AdvanceSearch(max_advance=6)
    assert search.refuse("advance 1 needs 9 GB, the limit is 8 GB") == Decision(
        advance=0, settled=True, reason="advance 1 needs 9 GB, the limit is 8 GB"
    )
    assert search.settled and search.running == 0


@pytest.mark.parametrize("bad", [{"max_advance": -1}, {"max_advance": 2, "advance": -1}])
def test_bad_numbers(bad):
    with pytest.raises(ValueError, match="advances of at least 0"):
        AdvanceSearch(**bad)
