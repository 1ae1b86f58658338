"""The settings that are compared. Pure; a new one is a line here."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from fractions import Fraction
from typing import Any

from common.errors import RecipeError
from common.suggest import did_you_mean

__all__ = ["REFERENCE", "SETTINGS", "Setting", "select"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What trains the model, apart from the learning rate.

    Attributes:
        name: what options, records and tables call it.
        contender: whose speed it has, as recipes/benchmark.py calls it. The averaging hardly changes the speed, so all settings
            of N pipelines share one; other batches than B have one of their own.
        num_pipelines: N.
        batch_factor: a pipeline's batch is this many times B.
        averaging: the "averaging" section of the configuration; None for DeepSpeed's own engine, and for the reference.
        decisive: whether the comparison hangs on it, so that it runs first.

    """

    name: str
    contender: str
    num_pipelines: int = 1
    batch_factor: Fraction = Fraction(1)
    averaging: dict[str, Any] | None = field(default=None, hash=False)
    decisive: bool = False

    @property
    def num_batches(self) -> Fraction:
        """How many times B samples an iteration trains."""
        return self.num_pipelines * self.batch_factor


#: One process, transformers and torch alone: it says what the model and the data can reach.
REFERENCE = Setting(name="reference", contender="reference", decisive=True)

#: Looser and tighter than 1/N. While the update u does not change, the reference runs ahead of the parallel models, where
#: gradients are computed, by (outer_lr - 1 + alpha) / alpha times u: with outer_lr N, three of them at N = 2 and alpha 1/2.
_ALPHAS: tuple[float | str, ...] = ("auto", 0.1, 0.9)

#: Under rules by which the reference gives way to the models, a large alpha overshoots: with N = 3 EASGD diverges from 0.5 on.
_ALPHAS_GIVING_WAY: tuple[float | str, ...] = ("auto", 0.1, 0.4)

#: Crossbow's momentum of the reference model. Without momentum SMA is EASGD.
_SMA_MOMENTUM = 0.9


def _deepspeed(batch_factor: int) -> Setting:
    """DeepSpeed's engine with a batch of `batch_factor` times B."""
    name = f"deepspeed-{batch_factor}x"
    contender = "deepspeed-1f1b" if batch_factor == 1 else f"deepspeed-1f1b-{batch_factor}x"
    return Setting(name=name, contender=contender, batch_factor=Fraction(batch_factor), decisive=True)


def _pipelines(num_pipelines: int) -> Iterator[Setting]:
    """Every rule with every alpha; "auto" is 1/N."""
    rules: dict[str, dict[str, Any]] = {
        f"avgpipe-outer{outer_lr}": {"rule": "avgpipe", "outer_lr": float(outer_lr)} for outer_lr in (1, num_pipelines)
    }
    rules |= {"easgd": {"rule": "easgd"}, "sma": {"rule": "sma", "momentum": _SMA_MOMENTUM}}
    for rule, averaging in rules.items():
        for alpha in _ALPHAS if averaging["rule"] == "avgpipe" else _ALPHAS_GIVING_WAY:
            shown = f"1/{num_pipelines}" if alpha == "auto" else f"{alpha:g}"
            yield Setting(
                name=f"n{num_pipelines}-{rule}-alpha{shown}",
                contender=f"avgpipe-n{num_pipelines}",
                num_pipelines=num_pipelines,
                averaging={**averaging, "alpha": alpha},
                decisive=alpha == "auto" and averaging["rule"] == "avgpipe",
            )


def _shared_batch(num_pipelines: int) -> Setting:
    """Each pipeline trains its part of a batch of B, so that the reference moves as often as with one pipeline."""
    factor = Fraction(1, num_pipelines)
    return Setting(
        name=f"n{num_pipelines}-avgpipe-outer1-alpha1/{num_pipelines}-shared",
        contender=f"avgpipe-n{num_pipelines}-shared",
        num_pipelines=num_pipelines,
        batch_factor=factor,
        averaging={"rule": "avgpipe", "outer_lr": 1.0, "alpha": "auto"},
        decisive=True,
    )


SETTINGS: tuple[Setting, ...] = (
    *(_deepspeed(factor) for factor in (1, 2, 3)),
    *(_shared_batch(number) for number in (2, 4, 8)),
    *_pipelines(2),
    *_pipelines(3),
)


def select(patterns: str) -> list[Setting]:
    """Return the settings whose name fits one of the comma-separated shell patterns.

    Raises:
        RecipeError: a pattern fits none.

    """
    wanted = [pattern.strip() for pattern in patterns.split(",")]
    for pattern in wanted:
        if not any(fnmatchcase(setting.name, pattern) for setting in SETTINGS):
            known = ", ".join(setting.name for setting in SETTINGS)
            raise RecipeError(
                f"--settings: {pattern!r} fits no setting.{did_you_mean(pattern, known.split(', '))} There are: {known}."
            )
    return [setting for setting in SETTINGS if any(fnmatchcase(setting.name, pattern) for pattern in wanted)]
