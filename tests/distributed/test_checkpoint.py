"""A run that was saved, stopped and resumed ends with the same bits as one that was not."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.models import Run, Task, merged, weights_of
from tests.distributed.world import World

SAVED_AFTER, ITERATIONS = 2, 5
BF16, ZERO1 = {"bf16": {"enabled": True}}, {"zero_optimization": {"stage": 1}}
WARMUP = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.05, "warmup_num_steps": 8, "warmup_type": "linear"}}}
TASK = Task(tied=True, dropout=0.2)


def a_run(num_pipelines: int = 2, **options: Any) -> Run:
    averaging = options.pop("averaging", {})
    options.setdefault("optimizer", "adamw")
    return Run(task=TASK, avgpipe={"num_pipelines": num_pipelines, "averaging": averaging}, **options)


def data_of(engine: Any, skip: int = 0) -> Any:
    return itertools.islice(TASK.data(seed=engine.grid.get_data_parallel_id()), skip, None)


def state_of(engine: Any) -> dict[str, Tensor]:
    state = {f"z.{name}": value for name, value in engine.reference_state_dict().items()}
    for pipeline in engine.pipelines:
        state |= {f"{pipeline.pipeline_id}.{name}": value for name, value in weights_of(pipeline.module).items()}
    return state


def go_on(engine: Any, data: Any, iterations: int) -> tuple[dict[str, Tensor], list[float], float, int, int]:
    """The end of a run: weights, losses, learning rate, steps, samples."""
    losses = [float(engine.train_batch(data)) for _ in range(iterations)]
    rate = engine.pipelines[-1].engine.basic_optimizer.param_groups[0]["lr"]
    return state_of(engine), losses, rate, engine.global_steps, engine.global_samples


def save_and_go_on(run: Run, directory: str) -> Any:
    """The uninterrupted run, saved on its way."""
    engine = run.engine()
    data = data_of(engine)
    for _ in range(SAVED_AFTER):
        engine.train_batch(data)
    engine.save_checkpoint(directory, client_state={"epoch": 3, "note": {"by": "user"}})
    end = go_on(engine, data, ITERATIONS - SAVED_AFTER)
    engine.close()
    return end


def resume(run: Run, directory: str, iterations_before: int) -> Any:
    """A run that loads, after some training of its own whose traces, in flight or not, must vanish."""
    engine = run.engine()
    if iterations_before:
        other = data_of(engine, skip=100)
        for _ in range(iterations_before):
            engine.train_batch(other)
    path, client_state = engine.load_checkpoint(directory)
    assert path is not None and client_state["epoch"] == 3 and client_state["note"] == {"by": "user"}
    assert "optimizer" not in client_state and "lr_scheduler" not in client_state
    assert engine.consumed_micro_batches == SAVED_AFTER * engine.num_pipelines * run.num_micro_batches
    assert engine.iteration == SAVED_AFTER
    end = go_on(engine, data_of(engine, skip=engine.consumed_micro_batches), ITERATIONS - SAVED_AFTER)
    engine.close()
    return end


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("run", "size", "iterations_before"),
    [
        pytest.param(a_run(1, optimizer="sgd"), 2, 0, id="N1-sgd"),
        pytest.param(a_run(3, config=WARMUP, clipping=0.5), 2, 2, id="N3-adamw-scheduler-clipping"),
        pytest.param(a_run(2, config=BF16), 2, 2, id="N2-bf16"),
        pytest.param(a_run(1, config=ZERO1), 2, 0, id="N1-zero1"),
        pytest.param(a_run(2, config=BF16 | ZERO1, averaging={"rule": "sma", "momentum": 0.5}), 4, 0, id="D2-bf16-zero1-sma"),
        pytest.param(a_run(2, config=ZERO1 | WARMUP, averaging={"outer_momentum": 0.5}), 4, 2, id="D2-zero1-scheduler-nesterov"),
    ],
)
def test_resumed_bit_for_bit(worlds: dict[int, World], tmp_path: Path, run: Run, size: int, iterations_before: int) -> None:
    uninterrupted = worlds[size].run(save_and_go_on, run, str(tmp_path))
    resumed = worlds[size].run(resume, run, str(tmp_path), iterations_before)
    for (state, *rest), (other_state, *other_rest) in zip(uninterrupted, resumed, strict=True):
        assert other_rest == rest
        assert [name for name, value in state.items() if not torch.equal(other_state[name], value)] == []


def try_to_load(run: Run, directory: str) -> tuple[str, bool, float]:
    """What is said of an unfit checkpoint, whether the engine is as before, and that it trains on."""
    engine = run.engine()
    data = data_of(engine)
    engine.train_batch(data)
    before = state_of(engine)
    try:
        engine.load_checkpoint(directory)
        said = "loaded"
    except Exception as error:  # noqa: BLE001
        said = f"{type(error).__name__}: {error}"
    unchanged = all(torch.equal(value, before[name]) for name, value in state_of(engine).items())
    loss = float(engine.train_batch(data))
    engine.close()
    return said, unchanged, loss


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("other", "text"),
    [
        pytest.param(a_run(3), "num_pipelines 2, now 3", id="N"),
        pytest.param(a_run(2, averaging={"rule": "easgd"}), "averaging rule 'avgpipe', now 'easgd'", id="rule"),
        pytest.param(a_run(1, num_stages=1), "num_pipelines 2, now 1; num_stages 2, now 1", id="stages"),
    ],
)
def test_another_shape_is_refused_before_anything_changes(
    worlds: dict[int, World], tmp_path: Path, other: Run, text: str
) -> None:
    worlds[2].run(save_and_go_on, a_run(2), str(tmp_path))
    for said, unchanged, loss in worlds[2].run(try_to_load, other, str(tmp_path)):
        assert said.startswith("ValueError: the checkpoint ") and text in said and "load_module_only=True" in said
        assert unchanged and loss == loss


@pytest.mark.timeout(60)
def test_a_missing_file_is_an_error_on_every_rank(worlds: dict[int, World], tmp_path: Path) -> None:
    worlds[2].run(save_and_go_on, a_run(2), str(tmp_path))
    next(tmp_path.rglob("avgpipe-stage_01*")).unlink()
    for said, unchanged, _ in worlds[2].run(try_to_load, a_run(2), str(tmp_path)):
        assert said.startswith("ValueError: ") and "avgpipe-stage_01-replica_00.pt is missing" in said
        assert unchanged


def load_reference_only(run: Run, directory: str) -> dict[str, Tensor]:
    engine = run.engine()
    engine.load_checkpoint(directory, load_module_only=True)
    state = state_of(engine)
    engine.train_batch(data_of(engine))
    engine.close()
    return state


def save_reference(run: Run, directory: str) -> dict[str, Tensor]:
    engine = run.engine()
    data = data_of(engine)
    for _ in range(2):
        engine.train_batch(data)
    engine.save_checkpoint(directory)
    reference = engine.reference_state_dict()
    engine.close()
    return reference


@pytest.mark.timeout(60)
def test_only_the_reference_into_another_shape(worlds: dict[int, World], tmp_path: Path) -> None:
    references = worlds[2].run(save_reference, a_run(2), str(tmp_path))
    for reference, state in zip(references, worlds[2].run(load_reference_only, a_run(3), str(tmp_path)), strict=True):
        for name, value in reference.items():
            for owner in ("z", "0", "1", "2"):
                assert torch.equal(state[f"{owner}.{name}"], value), (owner, name)


def load_into_deepspeed(run: Run, directory: str) -> tuple[dict[str, Tensor], list[Tensor]]:
    engine = run.deepspeed_engine()
    engine.load_checkpoint(directory, load_module_only=run.config == BF16)  # 0.19.8 can't load even its own optimizer's state
    masters = [weight.detach().clone() for group in engine.basic_optimizer.param_groups for weight in group["params"]]
    weights = weights_of(engine.module)
    engine.train_batch(data_of(engine))
    return weights, masters


@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    "config", [pytest.param({}, id="fp32"), pytest.param(BF16, id="bf16"), pytest.param(BF16 | ZERO1, id="bf16-zero1")]
)
def test_plain_deepspeed_loads_the_reference(worlds: dict[int, World], tmp_path: Path, config: dict[str, Any]) -> None:
    run = a_run(2, config=config)
    references = worlds[2].run(save_reference, run, str(tmp_path))
    for reference, (weights, masters) in zip(references, worlds[2].run(load_into_deepspeed, run, str(tmp_path)), strict=True):
        for name, value in reference.items():
            assert torch.equal(weights[name], value.to(weights[name].dtype)), name
        kept = weights if config == BF16 else reference
        total = sum(float(value.double().sum()) for value in kept.values())
        assert sum(float(master.double().sum()) for master in masters) == pytest.approx(total, rel=1e-5)


def save_deepspeed(run: Run, directory: str) -> dict[str, Tensor]:
    engine = run.deepspeed_engine()
    data = data_of(engine)
    for _ in range(2):
        engine.train_batch(data)
    engine.save_checkpoint(directory)
    return weights_of(engine.module)


def load_from_deepspeed(run: Run, directory: str) -> tuple[dict[str, Tensor], int]:
    engine = run.engine()
    engine.load_checkpoint(directory)
    state, steps = state_of(engine), engine.iteration
    for pipeline in engine.pipelines:
        assert all("exp_avg" in moments for moments in pipeline.engine.basic_optimizer.state_dict()["state"].values())
        assert pipeline.engine.basic_optimizer.state_dict()["state"]
    engine.train_batch(data_of(engine))
    engine.close()
    return state, steps


@pytest.mark.timeout(60)
def test_a_checkpoint_of_plain_deepspeed_starts_all_pipelines(worlds: dict[int, World], tmp_path: Path) -> None:
    saved = worlds[2].run(save_deepspeed, a_run(2), str(tmp_path))
    for weights, (state, steps) in zip(saved, worlds[2].run(load_from_deepspeed, a_run(2), str(tmp_path)), strict=True):
        assert steps == 2
        for name, value in weights.items():
            for owner in ("z", "0", "1"):
                assert torch.equal(state[f"{owner}.{name}"], value), (owner, name)


def fail_to_save(run: Run, directory: str) -> tuple[str, float]:
    """Save, save again in vain, and go on from the first with a new engine."""
    engine = run.engine()
    data = data_of(engine)
    engine.train_batch(data)
    engine.save_checkpoint(directory)
    engine.train_batch(data)
    try:
        engine.save_checkpoint(directory, client_state={"no": lambda: 0})
        said = "saved"
    except Exception as error:  # noqa: BLE001
        said = f"{type(error).__name__}: {error}"
    engine.close()
    engine = run.engine()
    engine.load_checkpoint(directory)
    assert engine.iteration == 1
    loss = float(engine.train_batch(data_of(engine, skip=engine.consumed_micro_batches)))
    engine.close()
    return said, loss


@pytest.mark.timeout(60)
def test_an_interrupted_save_leaves_the_older_one(worlds: dict[int, World], tmp_path: Path) -> None:
    for said, loss in worlds[2].run(fail_to_save, a_run(2), str(tmp_path)):
        assert "Can't pickle" in said
        assert loss == loss
    assert (tmp_path / "latest").read_text() == "global_step1"
    assert not list(tmp_path.rglob("*.tmp"))


def load_nothing(run: Run, directory: str) -> tuple[Any, Any]:
    engine = run.engine()
    found = engine.load_checkpoint(directory)
    engine.train_batch(data_of(engine))
    engine.close()
    return found


@pytest.mark.timeout(60)
def test_no_checkpoint_is_no_error(worlds: dict[int, World], tmp_path: Path) -> None:
    for path, _ in worlds[2].run(load_nothing, a_run(2), str(tmp_path)):
        assert path is None


@pytest.mark.timeout(60)
def test_one_model_on_all_stages(worlds: dict[int, World], tmp_path: Path) -> None:
    """Weights do not depend on the number of stages they are loaded into."""
    whole = merged(worlds[2].run(save_reference, a_run(2), str(tmp_path)))
    loaded = worlds[1].run(load_reference_only, replace(a_run(2), num_stages=1), str(tmp_path))[0]
    assert all(torch.equal(loaded[f"z.{name}"], value) for name, value in whole.items())
