"""What is read off a run's curve. Pure; training stops by the same rule that the analysis applies."""

from collections.abc import Sequence

from accuracy.records import Point

__all__ = ["final_accuracy", "passed_clearly", "samples_to_target", "smoothed"]


def smoothed(curve: Sequence[Point]) -> list[float]:
    """Return the accuracy over each validation and its two neighbours, so that one lucky validation does not count.

    The last validation has no neighbour after it yet and so no value; the first takes part with its one neighbour.
    """
    accuracies = [point.accuracy for point in curve]
    windows = [accuracies[max(0, index - 1) : index + 2] for index in range(len(curve) - 1)]
    return [sum(window) / len(window) for window in windows]


def samples_to_target(curve: Sequence[Point], target: float) -> float | None:
    """Return the samples trained when the accuracy came to `target`; None if it never did.

    That is at the first validation whose smoothed accuracy is at the target, moved back along the straight line from the
    validation before to where it crosses the target: validations are far apart, and contenders have them at different samples.
    """
    before: tuple[int, float] | None = None
    for point, accuracy in zip(curve, smoothed(curve), strict=False):
        if accuracy >= target:
            if before is None:
                return float(point.samples)
            samples_before, accuracy_before = before
            part = (target - accuracy_before) / (accuracy - accuracy_before)
            return samples_before + part * (point.samples - samples_before)
        before = point.samples, accuracy
    return None


def passed_clearly(curve: Sequence[Point], target: float) -> bool:
    """Tell whether two validations in a row had a smoothed accuracy at `target`: what comes then changes no result."""
    at_target = [accuracy >= target for accuracy in smoothed(curve)]
    return any(first and second for first, second in zip(at_target, at_target[1:], strict=False))


def final_accuracy(curve: Sequence[Point]) -> float:
    """Return the mean accuracy of the last three validations; 0 of a run that diverged before the first."""
    if not curve:
        return 0.0
    last = [point.accuracy for point in curve[-3:]]
    return sum(last) / len(last)
