"""bf16 and ZeRO-1 keep the method: averaging acts on the fp32 master weights; learning rates hold for all pipelines."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.distributed.history import Snapshot, State, assert_close, assert_same_history, train, whole
from tests.distributed.models import FP16_SUPPORTED, Run, Task, weights_of
from tests.distributed.oracle import Method, train_by_the_formulas
from tests.distributed.world import World

BF16 = {"bf16": {"enabled": True}}
ZERO1 = {"zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}  # DeepSpeed has not tested SGD
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}
needs_fp16 = pytest.mark.skipif(not FP16_SUPPORTED, reason="DeepSpeed refuses fp16 on this CPU")
PRECISIONS = [
    pytest.param({}, id="fp32"),
    pytest.param(ZERO1, id="zero1"),
    pytest.param(BF16, id="bf16"),
    pytest.param({**BF16, **ZERO1}, id="bf16-zero1"),
    # Without ZeRO, DeepSpeed's fp16 counts tied weights twice in the norm and decays weights once before the first step.
    pytest.param({**FP16, **ZERO1}, id="fp16-zero1", marks=needs_fp16),
]
N2 = Run(task=Task(tied=True), iterations=5, optimizer="adamw", clipping=0.5, avgpipe={"num_pipelines": 2})


def dtype_of(config: dict[str, Any]) -> torch.dtype:
    """What the modules compute in."""
    return torch.bfloat16 if "bf16" in config else torch.float16 if "fp16" in config else torch.float32


def assert_follows(ours: list[Snapshot], expected: list[Snapshot], run: Run) -> None:
    """Exactly in fp32. In 16 bits the weights roughly, and the way of the reference from the start, which is much shorter."""
    if dtype_of(run.config) is torch.float32:
        assert_same_history(ours, expected)
        return
    # AdamW's first steps are signs of gradients: where rounding turns one, the error is as long as the step.
    of_weights, of_way = (5e-2, 0.5) if run.optimizer == "adamw" else (1e-2, 5e-2)
    assert_same_history(ours, expected, of_weights)
    start = weights_of(run.task.plain())
    for name, theirs in expected[-1].reference.items():
        way = ours[-1].reference[name] - start[name].to(dtype_of(run.config)).float()
        assert_close(way, theirs - start[name], of_way, f"way of {name}")


@pytest.mark.parametrize("optimizer, rule", [("sgd", "avgpipe"), ("adamw", "avgpipe"), ("sgd", "easgd")])
@pytest.mark.parametrize("config", PRECISIONS)
def test_two_pipelines(worlds: dict[int, World], config: dict[str, Any], optimizer: str, rule: str) -> None:
    avgpipe = {"num_pipelines": 2, "averaging": {"rule": rule}}
    run = replace(N2, config=config, optimizer=optimizer, avgpipe=avgpipe)
    assert_follows(whole(worlds[2].run(train, run)), train_by_the_formulas(run), run)


def train_and_watch_masters(run: Run) -> list[tuple[State, list[State], list[State]]]:
    """After every iteration: the reference, and of each pipeline the fp32 masters and what its module computes with."""
    from avgpipe_ds.deepspeed_compat import master_groups

    engine = run.engine()
    data = run.task.data()
    history = []
    for _ in range(run.iterations):
        engine.train_batch(data)
        masters = []
        for pipeline in engine.pipelines:
            names = {id(p): name for name, p in pipeline.module.named_parameters()}
            (group,) = master_groups(pipeline.engine)
            values = group.whole(group.masters)
            masters.append({names[id(p)]: v.detach().clone() for p, v in zip(group.params, values, strict=True)})
        history.append((engine.reference_state_dict(), masters, [weights_of(pipeline.module) for pipeline in engine.pipelines]))
    engine.close()
    return history


@pytest.mark.parametrize("config", PRECISIONS)
def test_averaging_acts_on_the_masters(worlds: dict[int, World], config: dict[str, Any]) -> None:
    """The identity for d_t holds for the masters to fp32 rounding, and the module computes with the rounded masters."""
    run = replace(N2, config=config)
    for history in worlds[2].run(train_and_watch_masters, run):
        start = run.task.plain().to(dtype_of(config))
        z = weights_of(start.float())
        d = {name: w.double() * 0 for name, w in z.items()}
        for reference, masters, weights in history:
            for name, z_now in reference.items():
                assert z_now.dtype == torch.float32
                d_now = z_now.double() - sum(w[name].double() for w in masters) / len(masters)
                d_expected = 0.5 * d[name] + 0.5 * (z_now.double() - z[name].double())
                assert_close(d_now + z_now, d_expected + z_now, 2e-7, name)
                d[name] = d_now
                for master, weight in zip(masters, weights, strict=True):
                    assert torch.equal(master[name].to(weight[name].dtype), weight[name]), name
            z |= reference
        assert all(float(value.norm()) > 1e-3 for name, value in d.items() if name in reference)


def train_with_scheduler(run: Run) -> tuple[list[Snapshot], list[list[float]]]:
    """As `train`, and the learning rates of all pipelines as each step used them."""
    engine, used = run.engine(), [[] for _ in range(2)]
    for pipeline in engine.pipelines:
        pipeline.engine.basic_optimizer.register_step_pre_hook(
            lambda optimizer, *_, i=pipeline.pipeline_id: used[i].append(optimizer.param_groups[0]["lr"])
        )
    data = run.task.data()
    history = []
    for _ in range(run.iterations):
        loss = float(engine.train_batch(data))
        weights = [weights_of(pipeline.module) for pipeline in engine.pipelines]
        history.append(Snapshot(loss, float(engine.get_global_grad_norm()), [], weights, engine.reference_state_dict()))
    engine.close()
    return history, used


@pytest.mark.parametrize("config", PRECISIONS)
def test_all_pipelines_follow_the_scheduler_of_the_configuration(worlds: dict[int, World], config: dict[str, Any]) -> None:
    warmup = {"warmup_min_lr": 0.001, "warmup_max_lr": 0.01, "warmup_num_steps": 3, "warmup_type": "linear"}
    run = replace(N2, config={**config, "scheduler": {"type": "WarmupLR", "params": warmup}})
    results = worlds[2].run(train_with_scheduler, run)
    rates = results[0][1][0]
    assert rates == pytest.approx([0.001, 0.001, 0.004, 0.007, 0.01])
    assert all(used == rates for _, by_pipeline in results for used in by_pipeline)
    assert_follows_rates(whole([history for history, _ in results]), run, rates)


def train_with_changed_rate(run: Run, rates: list[float]) -> list[Snapshot]:
    """As `train`; the user sets the learning rate before every iteration on what `initialize` returned as optimizer."""
    engine = run.engine()
    data = run.task.data()
    history = []
    for rate in rates:
        engine.optimizer.param_groups[0]["lr"] = rate
        loss = float(engine.train_batch(data))
        weights = [weights_of(pipeline.module) for pipeline in engine.pipelines]
        history.append(Snapshot(loss, float(engine.get_global_grad_norm()), [], weights, engine.reference_state_dict()))
    engine.close()
    return history


@pytest.mark.parametrize("config", PRECISIONS)
def test_a_changed_learning_rate_holds_for_all_pipelines(worlds: dict[int, World], config: dict[str, Any]) -> None:
    rates = [0.01, 0.002, 0.03]
    run = replace(N2, config=config)
    assert_follows_rates(whole(worlds[2].run(train_with_changed_rate, run, rates)), run, rates)


def assert_follows_rates(ours: list[Snapshot], run: Run, rates: list[float]) -> None:
    method = Method(run)
    expected = []
    for rate in rates:
        for single in method.models:
            single.optimizer.param_groups[0]["lr"] = rate
        expected.append(method.iterate())
    assert_follows(ours, expected, run)


def error_of_initialize(run: Run) -> str:
    try:
        run.engine()
    except Exception as error:  # noqa: BLE001 - what the user sees
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.skipif(FP16_SUPPORTED, reason="DeepSpeed trains fp16 on this CPU")
def test_fp16_is_refused_on_other_cpus(worlds: dict[int, World]) -> None:
    errors = worlds[2].run(error_of_initialize, Run(config={"fp16": {"enabled": True}}, avgpipe={"num_pipelines": 2}))
    assert errors == ["ValueError: Type fp16 is not supported on your device."] * 2


@needs_fp16
def test_a_step_that_overflows_is_skipped(worlds: dict[int, World]) -> None:
    """A loss scale that is far too large: nobody moves until it has come down, and then all do."""
    fp16 = {"enabled": True, "initial_scale_power": 24, "hysteresis": 1}
    history = whole(worlds[2].run(train, replace(N2, iterations=16, config={"fp16": fp16, **ZERO1})))
    assert all(torch.isfinite(value).all() for snapshot in history for value in snapshot.reference.values())
    moved = [not torch.equal(a.reference["1.linear.weight"], b.reference["1.linear.weight"]) for a, b in pairwise(history)]
    first = moved.index(True)
    assert first > 2 and all(moved[first:])
