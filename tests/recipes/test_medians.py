"""How sure a median is."""

import math
import random

import pytest
from common.medians import median_interval


def test_few_values_give_their_extremes() -> None:
    assert median_interval([3.0, 1.0, 2.0]) == (2.0, 1.0, 3.0)


@pytest.mark.parametrize("count", [20, 61])
def test_holds_the_true_median_about_19_times_in_20(count: int) -> None:
    chance = random.Random(0)
    held = 0
    for _ in range(2000):
        middle, low, high = median_interval([chance.expovariate(1.0) for _ in range(count)])
        assert low <= middle <= high
        held += low <= math.log(2) <= high
    assert 0.93 <= held / 2000 <= 0.98
