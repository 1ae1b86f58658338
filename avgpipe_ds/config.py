"""The "avgpipe" block of a DeepSpeed configuration, parsed strictly.

A setting that is silently ignored costs a training run, so nothing is: unknown keys, values of a near-miss type ("2" for 2, true
for 1) and settings that the chosen rule or schedule does not use are errors. All problems are collected and reported together, so
that a configuration is repaired in one go.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo

from avgpipe_ds.averaging.stability import largest_stable_alpha
from avgpipe_ds.errors import ConfigError

__all__ = ["BLOCK", "AveragingConfig", "AvgPipeConfig", "ScheduleConfig", "TraceConfig", "TuningConfig"]

BLOCK = "avgpipe"
# Averaging settings that only some rules read.
_RULES_USING = {"momentum": ("sma",), "outer_lr": ("avgpipe",), "outer_momentum": ("avgpipe",)}


class _Section(BaseModel):
    """Base of all sections. The description of a field is what an error message says was expected."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class AveragingConfig(_Section):
    """How the parallel models and the reference model pull at each other (paper, section 3.2; docs/method.md)."""

    rule: Literal["avgpipe", "easgd", "sma"] = Field(default="avgpipe", description='one of "avgpipe", "easgd", "sma"')
    alpha: Annotated[float, Field(gt=0, le=1)] | Literal["auto"] = Field(
        default="auto", description='a number in (0, 1], or "auto" for 1 / num_pipelines'
    )
    momentum: float = Field(default=0.0, ge=0, lt=1, description="a number in [0, 1): SMA's mu, the momentum of the reference")
    outer_lr: float = Field(default=1.0, gt=0, description="a number above 0: how much of the mean update the reference takes")
    outer_momentum: float = Field(default=0.0, ge=0, lt=1, description="a number in [0, 1): Nesterov momentum of the reference")

    def alpha_for(self, num_pipelines: int) -> float:
        """Alpha as a number, "auto" resolved to 1 / `num_pipelines`.

        Args:
            num_pipelines: N, at least 1.

        Raises:
            ValueError: `num_pipelines` is below 1.

        """
        if num_pipelines < 1:
            raise ValueError(f"num_pipelines must be at least 1, got {num_pipelines}")
        return 1.0 / num_pipelines if self.alpha == "auto" else float(self.alpha)


class ScheduleConfig(_Section):
    """In which order a stage computes the micro-batches of one batch (paper, section 4; docs/schedules.md)."""

    name: Literal["1f1b", "gpipe", "advance_forward"] = Field(
        default="1f1b", description='one of "1f1b", "gpipe", "advance_forward"'
    )
    advance: Annotated[int, Field(ge=0)] | Literal["auto"] = Field(
        default=0,
        description='an integer >= 0: forwards that a stage runs further ahead of the next stage than in 1F1B, or "auto"',
    )


class TraceConfig(_Section):
    """Which `train_batch` calls are recorded, and where to (docs/timelines.md)."""

    directory: str = Field(min_length=1, description="a folder: every rank writes rank-<number>.json into it")
    warmup: int = Field(default=2, ge=0, description="an integer >= 0: train_batch calls before the recorded ones")
    iterations: int = Field(default=4, ge=1, description="an integer >= 1: train_batch calls to record")


class TuningConfig(_Section):
    """How "auto" is found out (paper, section 5; docs/tuning.md)."""

    iterations: int = Field(default=20, ge=1, description="an integer >= 1: train_batch calls that are profiled")
    max_pipelines: int = Field(default=4, ge=1, description="an integer >= 1: the largest num_pipelines to choose")
    predictor: Literal["simulation", "paper"] = Field(default="simulation", description='one of "simulation", "paper"')
    profile: str | None = Field(
        default=None, min_length=1, description="a file that the profile is written to before training ends, or null"
    )


class AvgPipeConfig(_Section):
    """The whole block. `AvgPipeConfig()` is plain DeepSpeed: one pipeline, 1F1B."""

    num_pipelines: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        default=1, description='an integer >= 1: N, the parallel pipelines, or "auto"'
    )
    averaging: AveragingConfig = Field(default=AveragingConfig(), description="an object with averaging settings")
    schedule: ScheduleConfig = Field(default=ScheduleConfig(), description="an object with schedule settings")
    partition: list[int] | None = Field(
        default=None,
        description="a list of K + 1 layer numbers that rise from 0, or null: where stages begin, and the last ends",
    )
    memory_limit_gb: float | None = Field(default=None, gt=0, description="a number above 0, or null: GB per accelerator")
    tuning: TuningConfig = Field(default=TuningConfig(), description="an object with tuning settings")
    trace: TraceConfig | None = Field(
        default=None, description="a folder for timelines, an object with directory, warmup and iterations, or null"
    )
    preflight: bool | Annotated[str, Field(min_length=1)] = Field(
        default=False,
        description="true or false: whether one micro-batch is checked before training; or a file that what is found is"
        " written to before training ends",
    )

    @field_validator("trace", mode="before")
    @classmethod
    def _directory_alone(cls, value: Any) -> Any:
        return {"directory": value} if isinstance(value, str) else value

    @property
    def alpha(self) -> float:
        """Alpha as a number, "auto" resolved with this configuration's `num_pipelines`."""
        return self.averaging.alpha_for(self.first_num_pipelines)

    @property
    def first_num_pipelines(self) -> int:
        """N that training starts with: 1 while "auto" is being found out."""
        return 1 if self.num_pipelines == "auto" else self.num_pipelines

    def with_pipelines(self, num_pipelines: int) -> AvgPipeConfig:
        """The same with this N.

        Raises:
            ConfigError: they do not go together.

        """
        try:
            return AvgPipeConfig.model_validate({**self.model_dump(), "num_pipelines": num_pipelines})
        except ValidationError as error:
            raise ConfigError(str(error)) from error

    @classmethod
    def from_deepspeed(cls, ds_config: Mapping[str, Any]) -> AvgPipeConfig:
        """Read the "avgpipe" block of a DeepSpeed configuration; without one, the defaults.

        Args:
            ds_config: the parsed DeepSpeed JSON. Other blocks are DeepSpeed's and are not looked at.

        Raises:
            ConfigError: with one line per problem: the full key, what was expected, what came, and the nearest known key.

        """
        if BLOCK not in ds_config:
            _reject_misspelled_block(ds_config)
        block = ds_config.get(BLOCK, {})
        if not isinstance(block, Mapping):
            raise ConfigError(f'"{BLOCK}": expected an object with {", ".join(cls.model_fields)}; got {block!r}')
        try:
            config = cls.model_validate(dict(block))
        except ValidationError as error:
            problems = _problems(error)
            # The model's own combination check runs only when every value is right by itself.
            problems |= {path: text for path, text in _combination_problems(block) if path not in problems}
            lines = "\n".join(f"  {BLOCK}.{path}: {text}" for path, text in problems.items())
            raise ConfigError(f'{len(problems)} problem(s) in the "{BLOCK}" block:\n{lines}') from None
        return config

    @model_validator(mode="after")
    def _check_combinations(self) -> AvgPipeConfig:
        problems = [f"{path}: {text}" for path, text in _combination_problems(self.model_dump())]
        if problems:
            raise ValueError("; ".join(problems))
        return self


def _combination_problems(block: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (key path, problem) of every setting that contradicts another; tolerates values that are wrong by themselves.

    Writing out a default is no contradiction, so that complete configurations can be generated.
    """
    averaging, schedule = block.get("averaging"), block.get("schedule")
    if isinstance(averaging, Mapping):
        rule = averaging.get("rule", "avgpipe")
        for key, rules in _RULES_USING.items():
            default = AveragingConfig.model_fields[key].default
            if rule in ("avgpipe", "easgd", "sma") and rule not in rules and averaging.get(key, default) != default:
                yield (
                    f"averaging.{key}",
                    f'expected {default:g}, since only rule {_quoted(rules)} uses it and the rule is "{rule}"; '
                    f"got {averaging[key]!r}",
                )
        if (problem := _unstable(averaging, block.get("num_pipelines", 1))) is not None:
            yield "averaging.alpha", problem
    yield from _tuning_problems(block)
    partition = block.get("partition")
    if isinstance(partition, list) and all(type(number) is int for number in partition) and not _rises(partition):
        yield "partition", f"expected {AvgPipeConfig.model_fields['partition'].description}; got {partition!r}"
    if isinstance(schedule, Mapping):
        name, advance = schedule.get("name", "1f1b"), schedule.get("advance", 0)
        if name in ("1f1b", "gpipe") and (advance == "auto" or (isinstance(advance, int) and advance > 0)):
            yield (
                "schedule.advance",
                f'expected 0, since only schedule "advance_forward" uses it and the schedule is "{name}"; got {advance!r}',
            )


def _tuning_problems(block: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    schedule, tuning = block.get("schedule"), block.get("tuning")
    if block.get("num_pipelines") != "auto":
        return
    if isinstance(schedule, Mapping) and schedule.get("name") == "gpipe":
        yield (
            "num_pipelines",
            'expected an integer with schedule "gpipe": what is predicted are 1F1B and advance forward; got "auto"',
        )
    if isinstance(tuning, Mapping) and tuning.get("profile") is not None:
        yield "num_pipelines", 'expected an integer with tuning.profile, which ends the training; got "auto"'


def _unstable(averaging: Mapping[str, Any], num_pipelines: Any) -> str | None:
    """What is wrong with an alpha that makes averaging diverge by itself."""
    rule, alpha, momentum = averaging.get("rule", "avgpipe"), averaging.get("alpha", "auto"), averaging.get("momentum", 0.0)
    if rule not in ("avgpipe", "easgd", "sma") or not _is_number(alpha) or not _is_number(momentum):
        return None
    if not isinstance(num_pipelines, int) or num_pipelines < 2:
        return None
    limit = largest_stable_alpha(rule, num_pipelines, momentum)
    if limit is None or alpha < limit:
        return None
    return (
        f'expected less than {limit:.4g}, since from there on {num_pipelines} pipelines under rule "{rule}" overshoot the'
        f' reference further in each iteration, or "auto"; got {alpha!r}'
    )


def _rises(numbers: list[int]) -> bool:
    return len(numbers) > 1 and numbers[0] == 0 and all(a < b for a, b in zip(numbers, numbers[1:], strict=False))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _problems(error: ValidationError) -> dict[str, str]:
    """One line per key path out of pydantic's errors, which repeat a path for each member of a union."""
    problems: dict[str, str] = {}
    for item in error.errors(include_url=False):
        section: type[BaseModel] = AvgPipeConfig
        path: list[str] = []
        expected = ""
        unknown = item["type"] in ("extra_forbidden", "invalid_key")
        for part in map(str, item["loc"]):
            field = section.model_fields.get(part)
            if field is None and not unknown:
                break  # a member of a union, not a key
            path.append(part)
            if field is not None:
                expected = field.description or ""
                section = _section_of(field) or section
        key = ".".join(path)
        if not path:  # raised by _check_combinations: reported by from_deepspeed, path by path
            continue
        if unknown:
            problems[key] = f"unknown key; {_suggestion(path, section)}"
        else:
            problems[key] = f"expected {expected}; got {item['input']!r}"
    return problems


def _section_of(field: FieldInfo) -> type[BaseModel] | None:
    """The section that a key holds, if it does."""
    for kind in (field.annotation, *get_args(field.annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def _suggestion(path: list[str], section: type[BaseModel]) -> str:
    """What the user may have meant by the unknown key `path`: the same key elsewhere, else the nearest name."""
    unknown, siblings = path[-1], list(section.model_fields)
    homes: dict[str, str] = {}
    for name, field in AvgPipeConfig.model_fields.items():
        homes[name] = name
        section_of_it = _section_of(field)
        if section_of_it is not None:
            homes |= {key: f"{name}.{key}" for key in section_of_it.model_fields}
    if unknown in homes:
        return f'it belongs to "{BLOCK}.{homes[unknown]}"'
    for candidates in (siblings, list(homes)):  # a key of the same section is the likelier meaning
        nearest = difflib.get_close_matches(unknown, candidates, n=1)
        if nearest:
            return (
                f'did you mean "{BLOCK}.{".".join([*path[:-1], nearest[0]]) if candidates is siblings else homes[nearest[0]]}"?'
            )
    return f"known keys here: {', '.join(siblings)}"


def _reject_misspelled_block(ds_config: Mapping[str, Any]) -> None:
    """Without this check "AvgPipe" or "avg_pipe" would train one pipeline and say nothing."""
    for key in ds_config:
        if isinstance(key, str) and difflib.get_close_matches(
            re.sub(r"[^a-z]", "", key.lower()), [BLOCK, f"{BLOCK}ds"], cutoff=0.8
        ):
            raise ConfigError(f'unknown block "{key}"; did you mean "{BLOCK}"?')


def _quoted(names: tuple[str, ...]) -> str:
    return " or ".join(f'"{name}"' for name in names)
