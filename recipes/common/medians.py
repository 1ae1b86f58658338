"""A median with what goes around it."""

import math
import statistics
from collections.abc import Sequence

__all__ = ["median_extremes", "median_interval"]


def median_extremes(values: Sequence[float]) -> tuple[float, float, float]:
    """The median, the least and the largest."""
    return statistics.median(values), min(values), max(values)


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The median, and the two values between which the median of such values lies with a probability of 95 %.

    By order statistics, so nothing is assumed of how the values are spread. Of less than six it gives the least and the largest.
    """
    ordered, count = sorted(values), len(values)
    below = max(0, math.floor(count / 2 - 0.98 * math.sqrt(count)))
    return statistics.median(ordered), ordered[below], ordered[count - 1 - below]
