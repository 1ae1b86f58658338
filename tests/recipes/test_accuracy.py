"""Time to accuracy: the grid, the curves, the comparison. Nothing is trained here."""

import json
import math
from types import SimpleNamespace

import pytest
from accuracy.analysis import BASE, attempts, best_of_each, compare
from accuracy.commands import undone
from accuracy.curves import final_accuracy, passed_clearly, samples_to_target, smoothed
from accuracy.grid import parse_rates, parse_seeds, parse_share, plan
from accuracy.plot import mean_curve, plot
from accuracy.records import Conditions, Point, Record, append, ensure_writable, read_all
from accuracy.report import as_json, cells, comparison_table, read_speeds, time_ratio, time_s
from accuracy.settings import REFERENCE, SETTINGS, select
from accuracy.target import reference_accuracy, target_accuracy
from accuracy.trainer import iterations_to_validate, samples_after, train, warm_up
from common.errors import RecipeError
from common.evaluation import Validation
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from avgpipe_ds.config import AvgPipeConfig
from avgpipe_ds.data import BatchShape

CONDITIONS = Conditions(
    model="minilm",
    dataset="rotten-tomatoes",
    max_length=32,
    batch_size=16,
    max_samples=1000,
    eval_every=100,
    warmup_samples=64,
    validation_samples=50,
)
NEVER = [0.5] * 10
AVGPIPE = "n2-avgpipe-outer1-alpha1/2"


def curve(accuracies):
    return [
        Point(samples=100 * number, accuracy=accuracy, loss=1 - accuracy, training_loss=1.0)
        for number, accuracy in enumerate(accuracies, start=1)
    ]


def step_at(number, high=0.9, length=10):
    """Accuracies of 0.5, and `high` from the given validation (from 1) on."""
    return [0.5] * (number - 1) + [high] * (length - number + 1)


def record(accuracies, *, setting=BASE, rate=1e-4, seed=0, stopped_at=None, conditions=CONDITIONS):
    return Record(
        setting=setting,
        learning_rate=rate,
        seed=seed,
        conditions=conditions,
        num_stages=1,
        num_micro_batches=1,
        stopped_at=stopped_at,
        curve=tuple(curve(accuracies)),
        run_s=1.0,
        versions={},
    )


def shape(num_pipelines=1, size=16):
    return BatchShape(num_pipelines=num_pipelines, num_replicas=1, num_micro_batches=1, micro_batch_size=size)


# Settings and grid


def test_settings_are_what_the_engine_takes():
    assert len({setting.name for setting in SETTINGS}) == len(SETTINGS) == 3 + 3 + 2 * 3 * 4
    for setting in SETTINGS:
        if setting.averaging is None:
            assert setting.num_pipelines == 1
        else:
            block = {"num_pipelines": setting.num_pipelines, "averaging": setting.averaging}
            config = AvgPipeConfig.from_deepspeed({"avgpipe": block})
            number = setting.num_pipelines
            assert setting.name.startswith(f"n{number}-{config.averaging.rule}")
            alpha = setting.name.rpartition("alpha")[2].removesuffix("-shared")
            assert config.alpha == pytest.approx(1 / number if alpha == f"1/{number}" else float(alpha))
            assert config.averaging.outer_lr == (number if f"-outer{number}-" in setting.name else 1)


def test_sma_is_not_easgd_by_another_name():
    assert all(setting.averaging["momentum"] > 0 for setting in select("*-sma-*"))


def test_contenders_have_as_many_samples_as_they_say():
    wanted = "deepspeed-*,n2-easgd-alpha1/2,n3-easgd-alpha1/3,*-shared"
    assert [setting.num_batches for setting in select(wanted)] == [1, 2, 3, 1, 1, 1, 2, 3]


def test_select():
    assert [setting.name for setting in select("n3-sma-*, deepspeed-2x")] == [
        "deepspeed-2x",
        "n3-sma-alpha1/3",
        "n3-sma-alpha0.1",
        "n3-sma-alpha0.4",
    ]
    with pytest.raises(RecipeError, match="'deepspeed-4x' fits no setting. Did you mean 'deepspeed-.x'"):
        select("n2-*,deepspeed-4x")


def test_plan_is_complete_and_begins_with_what_matters_most():
    runs = plan(SETTINGS, rates=[1e-4, 2e-4], seeds=[0, 1])
    assert len({run.key for run in runs}) == len(runs) == len(SETTINGS) * 4
    first = runs[: 10 * 4]
    assert {run.setting.name for run in first} == {
        "deepspeed-1x",
        "deepspeed-2x",
        "deepspeed-3x",
        "n2-avgpipe-outer1-alpha1/2-shared",
        "n4-avgpipe-outer1-alpha1/4-shared",
        "n8-avgpipe-outer1-alpha1/8-shared",
        "n2-avgpipe-outer1-alpha1/2",
        "n2-avgpipe-outer2-alpha1/2",
        "n3-avgpipe-outer1-alpha1/3",
        "n3-avgpipe-outer3-alpha1/3",
    }
    assert [run.seed for run in first] == [0] * 20 + [1] * 20
    assert [run.learning_rate for run in first[:20]] == [1e-4] * 10 + [2e-4] * 10


@given(st.integers(1, 5), st.integers(0, 40))
def test_shares_divide_the_plan(jobs, num_runs):
    runs = list(range(num_runs))
    shares = [runs[parse_share(f"{job}/{jobs}")] for job in range(jobs)]
    assert sorted(run for share in shares for run in share) == runs
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize("text", ["2/2", "1", "a/b", "-1/2", "0/0"])
def test_impossible_shares(text):
    with pytest.raises(RecipeError, match="--share takes I/J"):
        parse_share(text)


def test_numbers():
    assert parse_rates("5e-5, 1e-4,5e-5") == [5e-5, 1e-4]
    assert parse_seeds("2,0") == [2, 0]
    for parse, text in (
        (parse_rates, "0"),
        (parse_rates, "1e-4,"),
        (parse_rates, "nan"),
        (parse_seeds, "-1"),
        (parse_seeds, "1.5"),
    ):
        with pytest.raises(RecipeError, match="numbers above 0|integers from 0"):
            parse(text)


# Training


@given(st.integers(1, 3), st.integers(1, 20), st.integers(5, 150), st.integers(1, 600))
def test_validations_are_as_near_as_iterations_allow(num_pipelines, size, eval_every, max_samples):
    conditions = CONDITIONS.model_copy(update={"eval_every": eval_every, "max_samples": max_samples})
    division = shape(num_pipelines, size)
    per_iteration = division.samples_per_iteration
    iterations = iterations_to_validate(conditions, division)
    assert iterations == sorted(set(iterations))
    for wanted in range(eval_every, max_samples + 1, eval_every):
        nearest = min(abs(done * per_iteration - wanted) for done in range(1, wanted // per_iteration + 2))
        assert min(abs(done * per_iteration - wanted) for done in iterations) == nearest


def test_samples_after_an_uneven_epoch():
    division = shape(2, 4)  # 8 samples an iteration, 20 in the data set: 8, 8, 4
    assert [samples_after(iterations, 20, division) for iterations in range(8)] == [0, 8, 16, 20, 28, 36, 40, 48]


def test_warm_up_counts_samples():
    one, three = warm_up(CONDITIONS, shape(1)), warm_up(CONDITIONS, shape(3))
    assert [one(iteration) for iteration in range(5)] == [0.25, 0.5, 0.75, 1, 1]
    assert [three(iteration) for iteration in range(3)] == [0.75, 1, 1]
    assert warm_up(CONDITIONS.model_copy(update={"warmup_samples": 0}), shape())(0) == 1


class Scripted:
    """A trainer whose validations find what the script says."""

    shape = shape(size=50)

    def __init__(self, accuracies):
        self.script = iter(accuracies)
        self.trained = 0

    def train_iteration(self, batches):
        self.trained += 1
        return float(self.trained)

    def validate(self):
        return Validation(loss=0.5, num_samples=50, accuracy=next(self.script))

    def close(self):
        pass


def trained(accuracies, target):
    trainer = Scripted(accuracies)
    points, diverged = train(trainer, iter(()), CONDITIONS, num_samples=10_000, target=target, say=lambda point: None)
    assert not diverged
    return points, trainer


def test_training_uses_up_the_budget():
    points, trainer = trained(NEVER, None)
    assert trainer.trained == 20
    assert [point.samples for point in points] == list(range(100, 1001, 100))
    assert [point.training_loss for point in points] == [1.5 + 2 * number for number in range(10)]


def test_training_stops_when_two_smoothed_accuracies_are_there():
    # Smoothed: 0.5, 0.63, 0.77, 0.9, 0.9. The 0.9 of the sixth validation is what makes that of the fifth known.
    points, trainer = trained(step_at(3), target=0.85)
    assert len(points) == 6
    assert trainer.trained == 12


@pytest.mark.parametrize("lucky", [(0.9, 0.9, 0.5), (0.75, 0.9, 0.75)])
def test_training_does_not_stop_for_luck(lucky):
    """Two validations at the target whose smoothed accuracies are not; and a single smoothed accuracy that is, 0.8."""
    points, _ = trained([0.5, 0.5, *lucky, 0.5, 0.5, 0.5, 0.5, 0.5], target=0.79)
    assert len(points) == 10


# Curves


def test_smoothed():
    assert smoothed(curve([0.5, 0.6, 0.7, 0.9])) == pytest.approx([0.55, 0.6, 2.2 / 3])
    assert smoothed(curve([0.5])) == []


def test_one_lucky_validation_does_not_count():
    assert samples_to_target(curve([0.5, 0.5, 0.9, 0.5, 0.5, 0.5]), 0.8) is None
    assert samples_to_target(curve([0.5, 0.5, 0.5, 0.5, 0.9]), 0.5001) == pytest.approx(300 + 100 * 0.0001 / (0.4 / 3))


def test_samples_to_target_is_where_the_line_crosses():
    accuracies = curve([0, 0, 0.75, 0.75, 0.75, 0.75])  # smoothed 0, 0.25, 0.5, 0.75, 0.75
    assert samples_to_target(accuracies, 0.25) == 200
    assert samples_to_target(accuracies, 0.375) == 250
    assert samples_to_target(accuracies, 0.75) == 400
    assert samples_to_target(accuracies, 0) == 100
    assert samples_to_target(accuracies, 0.76) is None


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12), st.floats(0.01, 1))
def test_what_comes_after_a_stop_changes_nothing(accuracies, target):
    whole = curve(accuracies)
    for length in range(1, len(whole) + 1):
        if passed_clearly(whole[:length], target):
            assert samples_to_target(whole[:length], target) == samples_to_target(whole, target)


def test_final_accuracy():
    assert final_accuracy(curve([0.1, 0.6, 0.7, 0.8])) == pytest.approx(0.7)
    assert final_accuracy(curve([0.6])) == 0.6


# The target


def test_target_is_a_fraction_of_the_best_rate():
    records = [
        record([0.8, 0.8, 0.8], setting=REFERENCE.name, rate=1e-4, seed=0),
        record([0.9, 0.9, 0.9], setting=REFERENCE.name, rate=1e-4, seed=1),
        record([0.84] * 3, setting=REFERENCE.name, rate=5e-5),
        record([0.99] * 3, setting=BASE),
    ]
    assert reference_accuracy(records) == pytest.approx({5e-5: 0.84, 1e-4: 0.85})
    assert target_accuracy(records, 0.98) == pytest.approx(0.98 * 0.85)
    with pytest.raises(RecipeError, match="No run of the reference"):
        target_accuracy(records[3:], 0.98)


# Comparison


def comparison(records, target=0.85):
    return {row.attempt.setting: row for row in compare(attempts(records, target))}


def test_ratios_are_paired_by_seed():
    base = [record(step_at(number), seed=seed) for seed, number in enumerate((2, 4, 6))]
    other = [record(step_at(number), seed=seed, setting=AVGPIPE) for seed, number in enumerate((6, 4, 8))]
    row = comparison(base + other)[AVGPIPE]
    expected = {seed: row.attempt.samples[seed] / comparison(base)[BASE].attempt.samples[seed] for seed in range(3)}
    assert row.ratios == expected
    assert row.ratios[1] == 1
    assert row.median_ratio == sorted(expected.values())[1]


def test_never_counts_as_more_than_any_number():
    base = [record(step_at(4), seed=seed) for seed in range(3)]
    once = [record(accuracies, seed=seed, setting=AVGPIPE) for seed, accuracies in enumerate((step_at(4), NEVER, step_at(4)))]
    row = comparison(base + once)[AVGPIPE]
    assert (row.attempt.num_reached, row.median_ratio, row.ratios[1]) == (2, 1, math.inf)
    twice = [record(accuracies, seed=seed, setting=AVGPIPE) for seed, accuracies in enumerate((step_at(4), NEVER, NEVER))]
    row = comparison(base + twice)[AVGPIPE]
    assert row.attempt.median_samples == row.median_ratio == math.inf


def test_seeds_that_the_base_lacks_have_no_ratio():
    base = [record(step_at(4), seed=0), record(NEVER, seed=1)]
    other = [record(step_at(4), seed=seed, setting=AVGPIPE) for seed in range(3)]
    row = comparison(base + other)[AVGPIPE]
    assert set(row.ratios) == {0}
    assert math.isnan(comparison(other)[AVGPIPE].median_ratio)


def test_each_setting_has_its_own_best_rate():
    records = [
        record(step_at(6), rate=5e-5),
        record(step_at(4), rate=1e-4),
        record(step_at(4), rate=5e-5, setting=AVGPIPE),
        record(step_at(6), rate=1e-4, setting=AVGPIPE),
    ]
    best = best_of_each(attempts(records, 0.85))
    assert {setting: attempt.learning_rate for setting, attempt in best.items()} == {BASE: 1e-4, AVGPIPE: 5e-5}
    assert comparison(records)[AVGPIPE].median_ratio == 1
    assert comparison(records)[AVGPIPE].num_rates == 2
    assert len(compare(attempts(records, 0.85), every_rate=True)) == 4


@pytest.mark.parametrize(
    "better",
    [
        pytest.param([step_at(8), step_at(8), step_at(8)], id="more-seeds-there"),
        pytest.param([step_at(3), step_at(3), NEVER], id="sooner"),
        pytest.param([step_at(4), step_at(4), [0.6] * 10], id="higher-at-the-end"),
    ],
)
def test_what_makes_a_rate_better(better):
    records = [record(accuracies, seed=seed, rate=1e-4) for seed, accuracies in enumerate((step_at(4), step_at(4), NEVER))]
    records += [record(accuracies, seed=seed, rate=2e-4) for seed, accuracies in enumerate(better)]
    assert best_of_each(attempts(records, 0.85))[BASE].learning_rate == 2e-4


def test_an_unfinished_rate_is_not_the_best():
    records = [record(step_at(2), rate=2e-4), record(step_at(6), rate=1e-4), record(NEVER, rate=1e-4, seed=1)]
    assert best_of_each(attempts(records, 0.85))[BASE].learning_rate == 1e-4


def test_a_run_that_stopped_at_a_lower_target_says_nothing_of_a_higher():
    stopped = record(step_at(2, high=0.8, length=5), stopped_at=0.75)
    assert math.isfinite(attempts([stopped], 0.75)[0].samples[0])
    with pytest.raises(RecipeError, match="stopped early, at 0.7500"):
        attempts([stopped], 0.9)
    whole = record(NEVER, stopped_at=0.75)  # it did not stop, so it is known that it never came to 0.9 either
    assert attempts([whole], 0.9)[0].samples[0] == math.inf


# Records


def test_records_come_back(tmp_path):
    file = tmp_path / "runs.jsonl"
    written = [record(step_at(3), seed=0), record(NEVER, seed=1, stopped_at=0.8)]
    for one in written:
        append(file, one)
    assert read_all([file, tmp_path / "not-there-yet.jsonl", file]) == written


def test_a_last_line_without_its_end_is_no_trap(tmp_path):
    file = tmp_path / "runs.jsonl"
    append(file, record(NEVER, seed=0))
    file.write_text(file.read_text().rstrip("\n"))
    append(file, record(NEVER, seed=1))
    assert [one.seed for one in read_all([file])] == [0, 1]


def test_runs_that_are_done_are_skipped(tmp_path):
    runs = plan(select(BASE), rates=[5e-5, 1e-4], seeds=[0, 1])
    append(tmp_path / "mine.jsonl", record(NEVER, rate=5e-5, seed=1))
    append(tmp_path / "theirs.jsonl", record(NEVER, rate=1e-4, seed=0))
    left = undone(runs, [tmp_path / "mine.jsonl", tmp_path / "theirs.jsonl", tmp_path / "none.jsonl"], CONDITIONS)
    assert [(run.learning_rate, run.seed) for run in left] == [(5e-5, 0), (1e-4, 1)]


def test_other_conditions_are_refused(tmp_path):
    append(tmp_path / "a.jsonl", record(NEVER))
    append(tmp_path / "b.jsonl", record(NEVER, seed=1, conditions=CONDITIONS.model_copy(update={"batch_size": 8})))
    with pytest.raises(RecipeError, match="b.jsonl has a run of other conditions: batch_size 8, not 16"):
        read_all([tmp_path / "a.jsonl", tmp_path / "b.jsonl"])
    with pytest.raises(RecipeError, match="batch_size 8, not 16"):
        undone([], [tmp_path / "b.jsonl"], CONDITIONS)


@pytest.mark.parametrize(
    ("line", "message"), [("{", "line 2, is not a run"), ('{"setting": 1}', "setting Input should be a valid string")]
)
def test_a_broken_line_is_named(tmp_path, line, message):
    append(tmp_path / "runs.jsonl", record(NEVER))
    with (tmp_path / "runs.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(RecipeError, match=message):
        read_all([tmp_path / "runs.jsonl"])


def test_where_results_go_is_checked_before_they_cost_anything(tmp_path):
    ensure_writable(tmp_path / "new" / "runs.jsonl", option="--output")
    append(tmp_path / "new" / "runs.jsonl", record(NEVER))
    ensure_writable(tmp_path / "new" / "runs.jsonl", option="--output")
    assert len(read_all([tmp_path / "new" / "runs.jsonl"])) == 1
    with pytest.raises(RecipeError, match="--output .*runs.jsonl/x: can't write there"):
        ensure_writable(tmp_path / "new" / "runs.jsonl" / "x", option="--output")


# Report


def rows():
    records = [record(step_at(4), seed=seed) for seed in range(3)]
    records += [record(step_at(6), seed=seed, setting=AVGPIPE) for seed in range(3)]
    records += [record(NEVER, seed=seed, setting="n3-sma-alpha0.1") for seed in range(3)]
    return compare(attempts(records, 0.85))


def shown(speeds):
    console = Console(width=150, record=True, file=SimpleNamespace(write=lambda text: None, flush=lambda: None))
    console.print(comparison_table(rows(), speeds))
    return console.export_text()


def test_time_is_samples_times_speed():
    base, avgpipe, never = rows()
    speeds = {"deepspeed-1f1b": 0.02, "avgpipe-n2": 0.01}
    assert time_s(avgpipe, speeds) == pytest.approx(avgpipe.attempt.median_samples * 0.01)
    assert time_ratio(avgpipe, speeds) == pytest.approx(avgpipe.median_ratio / 2)
    assert time_ratio(base, speeds) == 1
    assert math.isnan(time_s(never, speeds))
    assert time_s(never, {**speeds, "avgpipe-n3": 0.01}) == math.inf


def test_time_has_the_spread_of_the_samples():
    records = [record(step_at(4), seed=seed) for seed in range(3)]
    records += [record(step_at(4 + 2 * seed), seed=seed, setting=AVGPIPE) for seed in range(3)]
    row = next(row for row in compare(attempts(records, 0.85)) if row.attempt.setting == AVGPIPE)
    low, middle, high = sorted(row.ratios.values())
    assert low == 1 and low < middle < high
    last = cells(row, {"deepspeed-1f1b": 0.02, "avgpipe-n2": 0.01})[-1]
    assert last == f"{middle / 2:.2f} ({low / 2:.2f} .. {high / 2:.2f})"
    assert cells(row, {"deepspeed-1f1b": 0.02})[-2:] == ["-", "-"]


def test_table_says_never_and_shows_time_only_with_speeds():
    text = shown({})
    assert "seconds" not in text
    line = next(line for line in text.splitlines() if "n3-sma" in line)
    assert "0 of 3" in line
    assert "never" in line
    assert "ratio of time" in shown({"deepspeed-1f1b": 0.02})


def test_json_is_json():
    text = json.dumps(as_json(rows(), {}, conditions=CONDITIONS, target=0.85), allow_nan=False)
    found = {row["setting"]: row for row in json.loads(text)["settings"]}
    assert found["n3-sma-alpha0.1"]["samples_to_target"] == {"0": None, "1": None, "2": None}
    assert found[BASE]["median_ratio"] == 1


def test_speeds(tmp_path):
    file = tmp_path / "speeds.json"
    file.write_text('{"deepspeed-1f1b": 0.02, "torch-zbv": 0.01}')
    assert read_speeds(file)["deepspeed-1f1b"] == 0.02
    for text in ("[]", '{"deepspeed-1f1b": 0}', '{"deepspeed-1f1b": "1"}', '{"avgpipe-n2": 0.1}', "{"):
        file.write_text(text)
        with pytest.raises(RecipeError, match="expected .*seconds per sample by contender"):
            read_speeds(file)


def test_every_contender_of_the_grid_can_have_a_speed():
    speeds = {setting.contender: 0.01 for setting in SETTINGS}
    ours = {"avgpipe-n2", "avgpipe-n3", "avgpipe-n2-shared", "avgpipe-n4-shared", "avgpipe-n8-shared"}
    assert set(speeds) == {"deepspeed-1f1b", "deepspeed-1f1b-2x", "deepspeed-1f1b-3x", *ours}
    assert "-" not in [cell.strip() for cell in shown(speeds).replace("│", "|").split("|")]


# Plot


def test_mean_curve_ends_with_the_shortest():
    assert mean_curve({0: [(100, 0.5), (200, 0.7)], 1: [(100, 0.7)]}) == [(100, pytest.approx(0.6))]


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    records = [record(step_at(4), seed=seed) for seed in range(2)]
    plot(tmp_path / "curves.png", attempts(records, 0.85), records, 0.85)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(RecipeError, match="--plot .*curves.nonsense"):
        plot(tmp_path / "curves.nonsense", attempts(records, 0.85), records, 0.85)


def test_plot_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(RecipeError, match="pip install matplotlib"):
        plot(tmp_path / "curves.png", [], [], 0.85)
