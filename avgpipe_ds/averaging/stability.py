"""How far parallel models may be pulled before averaging itself makes them diverge. Pure.

Under EASGD and SMA the models give way to the reference and the reference to N models at once. The distance between the reference
and the mean of the models, d = mean(w_i) - z, and the reference's last move, v, follow, apart from updates,

    d <- (1 - alpha - N alpha) d - mu v
    v <- N alpha d + mu v

whose two factors stay within the unit circle while alpha < 2 (1 + mu) / (1 + N + mu). At more than that each correction
overshoots further than the one before. Under the paper's rule the reference does not give way, d <- (1 - alpha) d, and any alpha
up to 1 is fine.
"""

from __future__ import annotations

__all__ = ["largest_stable_alpha"]


def largest_stable_alpha(rule: str, num_pipelines: int, momentum: float = 0.0) -> float | None:
    """The least alpha with which models that nothing else moves diverge; None if no alpha up to 1 does.

    Args:
        rule: "avgpipe", "easgd" or "sma".
        num_pipelines: N, at least 2.
        momentum: mu, in [0, 1); only "sma" has one.

    """
    if rule == "avgpipe":
        return None
    momentum = momentum if rule == "sma" else 0.0
    limit = 2 * (1 + momentum) / (1 + num_pipelines + momentum)
    return limit if limit <= 1 else None
