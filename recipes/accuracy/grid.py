"""Which runs there are, in which order, and which of them are this job's. Pure."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from common.errors import RecipeError

from accuracy.settings import Setting

__all__ = ["Run", "parse_rates", "parse_seeds", "parse_share", "plan"]

Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training."""

    setting: Setting
    learning_rate: float
    seed: int

    @property
    def key(self) -> tuple[str, float, int]:
        """As `Record.key`."""
        return self.setting.name, self.learning_rate, self.seed

    def __str__(self) -> str:
        return f"{self.setting.name}, learning rate {self.learning_rate:g}, seed {self.seed}"


def plan(settings: Iterable[Setting], *, rates: Sequence[float], seeds: Sequence[int]) -> list[Run]:
    """Return all runs, the most informative first: the decisive settings, then the others.

    Within either, a seed is finished before the next one begins: a grid that is cut short then has fewer seeds, but each of them
    complete, and seeds are compared pairwise.
    """
    settings = list(settings)
    return [
        Run(setting=setting, learning_rate=rate, seed=seed)
        for decisive in (True, False)
        for seed in seeds
        for rate in rates
        for setting in settings
        if setting.decisive == decisive
    ]


def parse_rates(text: str) -> list[float]:
    """Return comma-separated learning rates, each once."""
    return _numbers(text, float, fits=lambda rate: rate > 0, expected="--learning-rates: numbers above 0 such as 5e-5,1e-4")


def parse_seeds(text: str) -> list[int]:
    """Return comma-separated seeds, each once."""
    return _numbers(text, int, fits=lambda seed: seed >= 0, expected="--seeds: integers from 0 such as 0,1,2")


def parse_share(text: str) -> slice:
    """Return the slice of the plan for a share such as 0/2: every second run, from the first on."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise RecipeError(f"--share takes I/J, the I-th of J jobs counted from 0, such as 0/2 and 1/2; got {text!r}.")
    return slice(int(match[1]), None, int(match[2]))


def _numbers(text: str, kind: Callable[[str], Number], *, fits: Callable[[Number], bool], expected: str) -> list[Number]:
    try:
        numbers = list(dict.fromkeys(kind(part) for part in text.split(",")))
    except ValueError as error:
        raise RecipeError(f"{expected}; got {text!r}.") from error
    if not all(fits(number) for number in numbers):
        raise RecipeError(f"{expected}; got {text!r}.")
    return numbers
