"""Every problem of a configuration is named, with what was expected, what came, and the key that was meant."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from avgpipe_ds.config import AveragingConfig, AvgPipeConfig, ScheduleConfig, TraceConfig
from avgpipe_ds.errors import ConfigError


def parse(**block: Any) -> AvgPipeConfig:
    return AvgPipeConfig.from_deepspeed({"train_batch_size": 8, "avgpipe": block})


def problems(**block: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse(**block)
    head, *lines = str(caught.value).splitlines()
    assert head == f'{len(lines)} problem(s) in the "avgpipe" block:'
    return [line.strip() for line in lines]


@pytest.mark.parametrize("ds_config", [{}, {"train_batch_size": 8}, {"avgpipe": {}}])
def test_without_settings_it_is_plain_deepspeed(ds_config):
    config = AvgPipeConfig.from_deepspeed(ds_config)
    assert config == AvgPipeConfig()
    assert (config.num_pipelines, config.schedule.name, config.schedule.advance) == (1, "1f1b", 0)
    assert (config.averaging.rule, config.alpha, config.memory_limit_gb) == ("avgpipe", 1.0, None)


@pytest.mark.parametrize("value", [True, False, "report.json"])
def test_preflight(value):
    assert parse(preflight=value).preflight is value


@pytest.mark.parametrize("value", ["", 1, None, {}])
def test_preflight_is_a_choice_or_a_file(value):
    (line,) = problems(preflight=value)
    assert line.startswith("avgpipe.preflight: expected true or false") and line.endswith(f"got {value!r}")


def test_a_full_block():
    config = parse(
        num_pipelines=3,
        averaging={"rule": "avgpipe", "alpha": 0.1, "outer_lr": 2, "outer_momentum": 0.5},
        schedule={"name": "advance_forward", "advance": 2},
        memory_limit_gb=None,
    )
    assert config.averaging.outer_lr == 2.0 and isinstance(config.averaging.outer_lr, float), "an integer is fine for a number"
    assert config.schedule == ScheduleConfig(name="advance_forward", advance=2)
    assert config.alpha == 0.1


@pytest.mark.parametrize("num_pipelines, alpha, expected", [(4, "auto", 0.25), (1, "auto", 1.0), (4, 1, 1.0), (4, 0.3, 0.3)])
def test_alpha(num_pipelines, alpha, expected):
    assert parse(num_pipelines=num_pipelines, averaging={"alpha": alpha}).alpha == expected
    assert AveragingConfig(alpha=alpha).alpha_for(num_pipelines) == expected


def test_alpha_for_no_pipelines():
    with pytest.raises(ValueError, match="got 0"):
        AveragingConfig().alpha_for(0)


def test_it_is_frozen():
    with pytest.raises(ValidationError):
        parse().num_pipelines = 2


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("value", [0, -1, True, "2", 2.0, 1.5, None, [2]])
def test_num_pipelines_is_strict(value):
    assert problems(num_pipelines=value) == [
        f'avgpipe.num_pipelines: expected an integer >= 1: N, the parallel pipelines, or "auto"; got {value!r}'
    ]


@pytest.mark.parametrize("value", [0, -0.5, 1.01, True, "0.5", "atuo", NAN, INF, None, {}])
def test_alpha_is_strict(value):
    expected = f'avgpipe.averaging.alpha: expected a number in (0, 1], or "auto" for 1 / num_pipelines; got {value!r}'
    assert problems(averaging={"alpha": value}) == [expected]


@pytest.mark.parametrize(
    "section, key, values",
    [
        ("averaging", "rule", ["AvgPipe", "sgd", 1, None]),
        ("averaging", "momentum", [1, 1.5, -0.1, True, "0", NAN]),
        ("averaging", "outer_lr", [0, -1, True, "1", INF, NAN]),
        ("averaging", "outer_momentum", [1, -0.1, True, "0", NAN]),
        ("schedule", "name", ["1F1B", "afab", 1, None]),
        ("schedule", "advance", [-1, True, "1", 1.0, None]),
    ],
)
def test_settings_are_strict(section, key, values):
    for value in values:
        (line,) = problems(**{section: {key: value}})
        assert line.startswith(f"avgpipe.{section}.{key}: expected ") and line.endswith(f"; got {value!r}"), line
        assert "since" not in line, "of a value that is wrong by itself it says no more than that"


@pytest.mark.parametrize("value", [0, -1, True, "16", NAN, INF])
def test_memory_limit_is_strict(value):
    (line,) = problems(memory_limit_gb=value)
    assert line == f"avgpipe.memory_limit_gb: expected a number above 0, or null: GB per accelerator; got {value!r}"


@pytest.mark.parametrize("value", [None, 3, [], "2"])
def test_blocks_must_be_objects(value):
    with pytest.raises(
        ConfigError,
        match="expected an object with num_pipelines, averaging, schedule, partition, memory_limit_gb, tuning, trace, preflight",
    ):
        AvgPipeConfig.from_deepspeed({"avgpipe": value})
    (line,) = problems(schedule=value)
    assert line == f"avgpipe.schedule: expected an object with schedule settings; got {value!r}"


@pytest.mark.parametrize(
    "block, line",
    [
        ({"num_piplines": 2}, 'avgpipe.num_piplines: unknown key; did you mean "avgpipe.num_pipelines"?'),
        ({"alpha": 0.5}, 'avgpipe.alpha: unknown key; it belongs to "avgpipe.averaging.alpha"'),
        ({"advance": 1}, 'avgpipe.advance: unknown key; it belongs to "avgpipe.schedule.advance"'),
        ({"advancee": 1}, 'avgpipe.advancee: unknown key; did you mean "avgpipe.schedule.advance"?'),
        (
            {"averaging": {"advance": 1}},
            'avgpipe.averaging.advance: unknown key; it belongs to "avgpipe.schedule.advance"',
        ),
        (
            {"averaging": {"num_pipelines": 1}},
            'avgpipe.averaging.num_pipelines: unknown key; it belongs to "avgpipe.num_pipelines"',
        ),
        ({"averaging": {"momentun": 0}}, 'avgpipe.averaging.momentun: unknown key; did you mean "avgpipe.averaging.momentum"?'),
        ({"schedule": {"xyz": 0}}, "avgpipe.schedule.xyz: unknown key; known keys here: name, advance"),
        (
            {"zzz": 0},
            "avgpipe.zzz: unknown key; known keys here: "
            "num_pipelines, averaging, schedule, partition, memory_limit_gb, tuning, trace, preflight",
        ),
    ],
)
def test_unknown_keys_name_the_nearest(block, line):
    assert problems(**block) == [line]


def test_a_key_that_is_no_string():
    with pytest.raises(ConfigError, match=r"avgpipe\.3: unknown key"):
        AvgPipeConfig.from_deepspeed({"avgpipe": {3: 4}})


@pytest.mark.parametrize("name", ["AvgPipe", "avg_pipe", "avgpip", "avg-pipe", "AVGPIPE", "avgpipe_ds"])
def test_a_misspelled_block_is_not_ignored(name):
    with pytest.raises(ConfigError, match=f'unknown block "{name}"; did you mean "avgpipe"'):
        AvgPipeConfig.from_deepspeed({name: {"num_pipelines": 2}})


def test_auto_starts_with_one_pipeline_in_1f1b():
    config = parse(num_pipelines="auto", schedule={"name": "advance_forward", "advance": "auto"})
    assert (config.first_num_pipelines, config.alpha) == (1, 1.0)
    assert problems(num_pipelines="automatic") == [
        "avgpipe.num_pipelines: expected an integer >= 1: N, the parallel pipelines, or \"auto\"; got 'automatic'"
    ]


@pytest.mark.parametrize("advance", [2, "auto"])
@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_advance_needs_advance_forward(name, advance):
    assert problems(schedule={"name": name, "advance": advance}) == [
        f'avgpipe.schedule.advance: expected 0, since only schedule "advance_forward" uses it and the schedule is "{name}";'
        f" got {advance!r}"
    ]


@pytest.mark.parametrize(
    "rule, settings, unused",
    [
        ("avgpipe", {"momentum": 0.5}, ["momentum"]),
        ("easgd", {"momentum": 0.5, "outer_lr": 2, "outer_momentum": 0.5}, ["momentum", "outer_lr", "outer_momentum"]),
        ("sma", {"momentum": 0.5, "outer_lr": 2, "outer_momentum": 0.5}, ["outer_lr", "outer_momentum"]),
    ],
)
def test_settings_that_the_rule_does_not_use(rule, settings, unused):
    lines = problems(averaging={"rule": rule, **settings})
    assert [line.split(":")[0] for line in lines] == [f"avgpipe.averaging.{key}" for key in unused]
    assert all(f'the rule is "{rule}"' in line for line in lines)


def test_a_trace_is_a_folder_or_an_object():
    assert parse().trace is None and parse(trace=None).trace is None
    assert parse(trace="runs/trace").trace == TraceConfig(directory="runs/trace", warmup=2, iterations=4)
    assert parse(trace={"directory": "t", "warmup": 0, "iterations": 1}).trace == TraceConfig(
        directory="t", warmup=0, iterations=1
    )


FOLDER = "a folder: every rank writes rank-<number>.json into it"


@pytest.mark.parametrize(
    "trace, line",
    [
        (True, "trace: expected a folder for timelines, an object with directory, warmup and iterations, or null; got True"),
        ("", f"trace.directory: expected {FOLDER}; got ''"),
        ({"directory": 3}, f"trace.directory: expected {FOLDER}; got 3"),
        ({}, f"trace.directory: expected {FOLDER}; got {{}}"),
        ({"directory": "t", "iterations": 0}, "trace.iterations: expected an integer >= 1: train_batch calls to record; got 0"),
        (
            {"directory": "t", "warmup": -1},
            "trace.warmup: expected an integer >= 0: train_batch calls before the recorded ones; got -1",
        ),
        ({"directory": "t", "iteration": 3}, 'trace.iteration: unknown key; did you mean "avgpipe.trace.iterations"?'),
    ],
)
def test_a_trace_is_strict(trace, line):
    assert problems(trace=trace) == [f"avgpipe.{line}"]


def test_writing_out_defaults_is_fine():
    defaults = {"momentum": 0, "outer_lr": 1, "outer_momentum": 0}
    assert parse(averaging={"rule": "easgd", **defaults}, schedule={"name": "gpipe", "advance": 0}).averaging.rule == "easgd"


@pytest.mark.parametrize(
    ("averaging", "num_pipelines", "limit"),
    [
        ({"rule": "easgd", "alpha": 0.9}, 2, "0.6667"),
        ({"rule": "easgd", "alpha": 0.5}, 3, "0.5"),
        ({"rule": "sma", "alpha": 0.9, "momentum": 0.9}, 3, "0.7755"),
        ({"rule": "sma", "alpha": 1}, 2, "0.6667"),
    ],
)
def test_an_alpha_with_which_averaging_diverges(averaging, num_pipelines, limit):
    (line,) = problems(num_pipelines=num_pipelines, averaging=averaging)
    assert line.startswith(f"avgpipe.averaging.alpha: expected less than {limit}, since from there on {num_pipelines} pipelines")
    assert line.endswith(f'or "auto"; got {averaging["alpha"]}')


@pytest.mark.parametrize(
    ("averaging", "num_pipelines"),
    [
        ({"rule": "easgd", "alpha": 0.9}, 1),  # there is nothing to average
        ({"rule": "easgd", "alpha": 0.66}, 2),
        ({"rule": "easgd"}, 2),
        ({"rule": "sma", "alpha": 0.9, "momentum": 0.9}, 2),
        ({"rule": "avgpipe", "alpha": 1}, 8),
    ],
)
def test_an_alpha_with_which_it_does_not(averaging, num_pipelines):
    assert parse(num_pipelines=num_pipelines, averaging=averaging).averaging.rule == averaging["rule"]


def test_all_problems_at_once():
    lines = problems(
        num_pipelines=True,
        averaging={"alpha": 2, "momentum": 0.5},
        schedule={"advance": 3, "namee": "1f1b"},
        memory_limit=5,
    )
    assert sorted(line.split(":")[0] for line in lines) == [
        "avgpipe.averaging.alpha",
        "avgpipe.averaging.momentum",
        "avgpipe.memory_limit",
        "avgpipe.num_pipelines",
        "avgpipe.schedule.advance",
        "avgpipe.schedule.namee",
    ]


def test_combinations_are_checked_without_json_too():
    with pytest.raises(ValueError, match="schedule.advance: expected 0"):
        AvgPipeConfig(schedule=ScheduleConfig(advance=2))


@pytest.mark.parametrize("partition", [[0], [1, 2], [0, 2, 2], [0, 3, 1], []])
def test_a_partition_rises_from_0(partition):
    (line,) = problems(partition=partition)
    assert line.startswith("avgpipe.partition: expected a list of K + 1 layer numbers that rise from 0") and line.endswith(
        f"got {partition}"
    )


def test_a_partition_is_whole_numbers():
    assert problems(partition=[0, 1.5]) and problems(partition="0,1")
    assert parse(partition=[0, 3, 7]).partition == [0, 3, 7]


def test_auto_is_predicted_for_some_schedules_only():
    (line,) = problems(num_pipelines="auto", schedule={"name": "gpipe"})
    assert line.startswith('avgpipe.num_pipelines: expected an integer with schedule "gpipe"')
    (line,) = problems(num_pipelines="auto", tuning={"profile": "p.json"})
    assert line.startswith("avgpipe.num_pipelines: expected an integer with tuning.profile")


def test_another_number_of_pipelines_is_checked():
    config = parse(num_pipelines="auto", averaging={"rule": "easgd", "alpha": 0.5})
    assert config.with_pipelines(2).num_pipelines == 2 and config.with_pipelines(2).averaging == config.averaging
    with pytest.raises(ConfigError, match="expected less than 0.5"):
        config.with_pipelines(3)
