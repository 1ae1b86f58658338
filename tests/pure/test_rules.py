"""Averaging rules against the formulas of docs/method.md, computed by hand in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from avgpipe_ds.averaging.rules import AveragingRule, AvgPipeRule, EASGDRule, SMARule, make_rule
from avgpipe_ds.averaging.stability import largest_stable_alpha
from avgpipe_ds.config import AveragingConfig

SHAPES = [(3, 4), (5,), (2, 1, 3)]
ALL = range(len(SHAPES))


def tensors(seed: int, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [scale * torch.randn(shape, generator=generator) for shape in SHAPES]


def flat(weights: list[Tensor]) -> Tensor:
    return torch.cat([weight.double().flatten() for weight in weights])


def update(pipeline_id: int, iteration: int) -> list[Tensor]:
    return tensors(1000 + 10 * iteration + pipeline_id, scale=0.1)


def run(
    rule: AveragingRule, models: list[list[Tensor]], iterations: range, groups: tuple[range, ...] = (ALL,)
) -> list[tuple[Tensor, list[Tensor]]]:
    """Train with prescribed updates; (z, [w_i]) after every iteration, flat in float64."""
    history = []
    for iteration in iterations:
        for i, model in enumerate(models):
            for group in groups:
                weights = [model[index] for index in group]
                rule.before_step(weights, group)
                for index in group:
                    model[index] += update(i, iteration)[index]
                rule.after_step(weights, group)
        rule.finish_iteration()
        history.append((flat(rule.reference), [flat(model) for model in models]))
    return history


def start(rule: AveragingRule, dtype: torch.dtype = torch.float32) -> list[list[Tensor]]:
    models = [[weight.to(dtype) for weight in tensors(0)] for _ in range(rule.num_pipelines)]
    rule.initialize(models[0])
    return models


def expected(kind: str, num_pipelines: int, alpha: float, iterations: int, **extra: float) -> list[tuple[Tensor, list[Tensor]]]:
    """The formulas, literally, in float64."""
    z = flat(tensors(0))
    w = [z.clone() for _ in range(num_pipelines)]
    z_prev, v = z.clone(), torch.zeros_like(z)
    history = []
    for t in range(iterations):
        u = [flat(update(i, t)) for i in range(num_pipelines)]
        if kind == "avgpipe":
            w = [(1 - alpha) * (w[i] + u[i]) + alpha * z for i in range(num_pipelines)]
            mean = sum(u, torch.zeros_like(z)) / num_pipelines
            momentum = extra.get("outer_momentum", 0.0)
            v = momentum * v + mean
            z = z + extra.get("outer_lr", 1.0) * (mean + momentum * v if momentum else mean)
        else:
            c = [alpha * (w[i] - z) for i in range(num_pipelines)]
            w = [w[i] + u[i] - c[i] for i in range(num_pipelines)]
            z, z_prev = z + sum(c, torch.zeros_like(z)) + extra.get("momentum", 0.0) * (z - z_prev), z
        history.append((z, w))
    return history


RULES = [
    ("avgpipe", lambda n, a: AvgPipeRule(alpha=a, num_pipelines=n), {}),
    ("avgpipe", lambda n, a: AvgPipeRule(alpha=a, num_pipelines=n, outer_lr=2.0), {"outer_lr": 2.0}),
    (
        "avgpipe",
        lambda n, a: AvgPipeRule(alpha=a, num_pipelines=n, outer_lr=0.7, outer_momentum=0.9),
        {"outer_lr": 0.7, "outer_momentum": 0.9},
    ),
    ("easgd", lambda n, a: EASGDRule(alpha=a, num_pipelines=n), {}),
    ("sma", lambda n, a: SMARule(alpha=a, num_pipelines=n), {}),
    ("sma", lambda n, a: SMARule(alpha=a, num_pipelines=n, momentum=0.8), {"momentum": 0.8}),
]


@pytest.mark.parametrize("kind, build, extra", RULES)
@pytest.mark.parametrize("num_pipelines, alpha", [(2, 0.5), (3, 0.1), (4, 1.0)])
def test_rules_follow_their_formulas(kind, build, extra, num_pipelines, alpha):
    rule = build(num_pipelines, alpha)
    got = run(rule, start(rule), range(5))
    for (z, w), (z_expected, w_expected) in zip(got, expected(kind, num_pipelines, alpha, 5, **extra), strict=True):
        torch.testing.assert_close(z, z_expected, rtol=1e-5, atol=1e-5)
        for w_i, w_i_expected in zip(w, w_expected, strict=True):
            torch.testing.assert_close(w_i, w_i_expected, rtol=1e-5, atol=1e-5)


def test_avgpipe_by_hand():
    """One weight, N = 2, alpha 1/2, two iterations worked out on paper."""
    rule = AvgPipeRule(alpha=0.5, num_pipelines=2)
    models = [[torch.tensor([1.0])], [torch.tensor([1.0])]]
    rule.initialize(models[0])
    for updates in ((0.4, 0.2), (0.1, -0.3)):
        for model, u in zip(models, updates, strict=True):
            rule.before_step(model, [0])
            model[0] += u
            rule.after_step(model, [0])
        rule.finish_iteration()
    # t=1: w = (1.4 + 1)/2, (1.2 + 1)/2 = 1.2, 1.1; z = 1.3.  t=2: w = (1.3 + 1.3)/2, (0.8 + 1.3)/2; z = 1.3 - 0.1
    assert models[0][0].item() == pytest.approx(1.3)
    assert models[1][0].item() == pytest.approx(1.05)
    assert rule.reference[0].item() == pytest.approx(1.2)


@pytest.mark.parametrize("num_pipelines, alpha, outer_lr", [(2, 0.5, 1.0), (3, 0.25, 1.0), (3, 0.9, 3.0)])
def test_distance_identity(num_pipelines, alpha, outer_lr):
    """d_t = z_t - mean_i(w_i,t) obeys d_t = (1 - alpha) d_(t-1) + (outer_lr - 1 + alpha) mean_i(u_i,t)."""
    rule = AvgPipeRule(alpha=alpha, num_pipelines=num_pipelines, outer_lr=outer_lr)
    distance = torch.zeros(sum(torch.Size(shape).numel() for shape in SHAPES), dtype=torch.float64)
    for t, (z, w) in enumerate(run(rule, start(rule), range(8))):
        mean_update = torch.stack([flat(update(i, t)) for i in range(num_pipelines)]).mean(0)
        distance = (1 - alpha) * distance + (outer_lr - 1 + alpha) * mean_update
        torch.testing.assert_close(z - torch.stack(w).mean(0), distance, rtol=1e-4, atol=1e-5)


def test_outer_step_is_sgd_with_nesterov_momentum():
    """With -mean(u) as its gradient, torch's own optimizer moves z the same way."""
    rule = AvgPipeRule(alpha=0.5, num_pipelines=2, outer_lr=0.7, outer_momentum=0.9)
    z = torch.nn.Parameter(flat(tensors(0)))
    sgd = torch.optim.SGD([z], lr=0.7, momentum=0.9, nesterov=True)
    for t, (reference, _) in enumerate(run(rule, start(rule), range(6))):
        z.grad = -(flat(update(0, t)) + flat(update(1, t))) / 2
        sgd.step()
        torch.testing.assert_close(reference, z.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind, build, extra", RULES)
def test_groups_one_by_one_are_bitwise_the_same(kind, build, extra):
    """DeepSpeed's ZeRO optimizer steps one parameter group at a time."""
    whole, parts = build(3, 0.3), build(3, 0.3)
    at_once = run(whole, start(whole), range(4))
    in_groups = run(parts, start(parts), range(4), groups=(range(0, 1), range(1, 1), range(1, 3)))
    for (z, w), (z_groups, w_groups) in zip(at_once, in_groups, strict=True):
        assert torch.equal(z, z_groups)
        assert all(torch.equal(a, b) for a, b in zip(w, w_groups, strict=True))


@pytest.mark.parametrize("kind, build, extra", RULES)
def test_resuming_is_bitwise_the_same(kind, build, extra):
    straight = build(2, 0.4)
    expected_history = run(straight, start(straight), range(6))

    first = build(2, 0.4)
    models = start(first)
    run(first, models, range(3))
    resumed = build(2, 0.4)
    start(resumed)
    memory = [z.data_ptr() for z in resumed.reference]
    resumed.load_state_dict(first.state_dict())
    assert memory == [z.data_ptr() for z in resumed.reference], "others may hold the reference: load in place, share nothing"
    z, w = run(resumed, models, range(3, 6))[-1]
    assert torch.equal(z, expected_history[-1][0])
    assert all(torch.equal(a, b) for a, b in zip(w, expected_history[-1][1], strict=True))


def test_a_skipped_step_is_a_zero_update():
    rule = AvgPipeRule(alpha=0.5, num_pipelines=2)
    models = start(rule)
    rule.before_step(models[0], ALL)
    for weight in models[0]:
        weight += 0.5
    rule.after_step(models[0], ALL)
    rule.finish_iteration()  # pipeline 1 overflowed and did not step
    torch.testing.assert_close(flat(rule.reference), flat(tensors(0)) + 0.25)
    torch.testing.assert_close(flat(models[1]), flat(tensors(0)))


@pytest.mark.parametrize("kind, build, extra", RULES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_reference_is_fp32_whatever_the_weights(kind, build, extra, dtype):
    rule = build(2, 0.5)
    models = start(rule, dtype)
    z, w = run(rule, models, range(3))[-1]
    assert all(reference.dtype is torch.float32 for reference in rule.reference)
    assert all(weight.dtype is dtype for model in models for weight in model)
    z_expected, w_expected = expected(kind, 2, 0.5, 3, **extra)[-1]
    torch.testing.assert_close(z, z_expected, rtol=0.05, atol=0.05)
    torch.testing.assert_close(w[1], w_expected[1], rtol=0.05, atol=0.05)


def test_parameters_that_require_grad_are_updated_in_place():
    rule = AvgPipeRule(alpha=0.5, num_pipelines=2)
    weights = [torch.nn.Parameter(weight) for weight in tensors(0)]
    rule.initialize(weights)
    rule.before_step(weights, ALL)
    with torch.no_grad():
        weights[0].add_(1.0)
    rule.after_step(weights, ALL)
    torch.testing.assert_close(weights[0].detach(), tensors(0)[0] + 0.5)
    assert not any(z.requires_grad for z in rule.reference)


def test_the_reference_does_not_share_memory_with_the_weights():
    rule = EASGDRule(alpha=0.5, num_pipelines=2)
    weights = tensors(0)
    rule.initialize(weights)
    weights[0].zero_()
    torch.testing.assert_close(rule.reference[0], tensors(0)[0])


def test_a_stage_with_nothing_to_train():
    rule = AvgPipeRule(alpha=0.5, num_pipelines=2, outer_momentum=0.5)
    rule.initialize([])
    rule.before_step([], [])
    rule.after_step([], [])
    rule.finish_iteration()
    assert rule.state_dict() == {"reference": [], "velocity": []}


def test_state_is_refused_within_an_iteration():
    rule = AvgPipeRule(alpha=0.5, num_pipelines=2)
    models = start(rule)
    rule.before_step(models[0], ALL)
    with pytest.raises(RuntimeError, match="between iterations"):
        rule.state_dict()
    rule.after_step(models[0], ALL)
    rule.finish_iteration()
    rule.state_dict()


@pytest.mark.parametrize("make", [AvgPipeRule, EASGDRule, SMARule])
def test_weights_that_nobody_steps_leave_their_reference(make: type[AveragingRule]):
    rule = make(alpha=0.5, num_pipelines=2)
    models = start(rule)
    run(rule, models, range(2))
    before = [z.clone() for z in rule.reference]
    run(rule, models, range(2, 3), groups=(range(2),))
    moved = [not torch.equal(z, old) for z, old in zip(rule.reference, before, strict=True)]
    assert moved == [True, True, False]


@pytest.mark.parametrize("make", [AvgPipeRule, EASGDRule, SMARule])
def test_loading_gives_up_an_iteration_under_way(make: type[AveragingRule]):
    rule, fresh = make(alpha=0.5, num_pipelines=2), make(alpha=0.5, num_pipelines=2)
    start(rule)
    rule.before_step(tensors(3), ALL)
    rule.after_step(tensors(4), ALL)
    rule.load_state_dict({"reference": tensors(0), "velocity": []})
    for one, other in zip(run(rule, start(fresh), range(2)), run(fresh, start(fresh), range(2)), strict=True):
        assert torch.equal(one[0], other[0])


def test_loading_other_shapes_is_refused():
    rule = AvgPipeRule(alpha=0.5, num_pipelines=2)
    start(rule)
    with pytest.raises(ValueError, match=r"\(3, 4\).*\(7,\)"):
        rule.load_state_dict({"reference": [torch.zeros(7)], "velocity": []})


def test_loading_without_velocity_restarts_momentum():
    rule = SMARule(alpha=0.5, num_pipelines=2, momentum=0.9)
    run(rule, start(rule), range(2))
    rule.load_state_dict({"reference": tensors(5), "velocity": []})
    assert all(not v.any() for v in rule.state_dict()["velocity"])


@pytest.mark.parametrize(
    "settings, rule_type, attributes",
    [
        ({}, AvgPipeRule, {"alpha": 0.25, "outer_lr": 1.0, "momentum": 0.0}),
        ({"alpha": 0.1, "outer_lr": 2, "outer_momentum": 0.5}, AvgPipeRule, {"alpha": 0.1, "outer_lr": 2, "momentum": 0.5}),
        ({"rule": "easgd", "alpha": 0.1}, EASGDRule, {"alpha": 0.1}),
        ({"rule": "sma", "momentum": 0.3}, SMARule, {"alpha": 0.25, "momentum": 0.3}),
    ],
)
def test_make_rule(settings, rule_type, attributes):
    rule = make_rule(AveragingConfig(**settings), 4)
    assert type(rule) is rule_type
    assert {name: getattr(rule, name) for name in attributes} == attributes


def test_one_pipeline_gets_no_rule():
    with pytest.raises(ValueError, match="at least 2 pipelines, got 1"):
        make_rule(AveragingConfig(), 1)


@pytest.mark.parametrize("num_pipelines", [2, 3, 8])
@pytest.mark.parametrize(("kind", "momentum"), [("easgd", 0.0), ("sma", 0.3), ("sma", 0.9)])
def test_averaging_alone_converges_below_the_largest_stable_alpha_and_diverges_above(kind, momentum, num_pipelines):
    """Models at random places that nothing else moves."""
    limit = largest_stable_alpha(kind, num_pipelines, momentum)
    assert limit is not None
    for alpha, converges in ((0.97 * limit, True), (min(1.0, 1.03 * limit), False)):
        rule = make_rule(AveragingConfig(rule=kind, alpha=alpha, momentum=momentum), num_pipelines)
        start(rule)
        models = [tensors(seed) for seed in range(1, num_pipelines + 1)]
        for _ in range(400):
            for model in models:
                rule.before_step(model, ALL)
                rule.after_step(model, ALL)
            rule.finish_iteration()
        distance = float((flat(rule.reference) - sum(flat(model) for model in models) / num_pipelines).norm())
        assert (distance < 1e-3) if converges else not distance < 1e3, (alpha, distance)


def test_the_rule_of_the_paper_is_stable_whatever_alpha_is():
    assert largest_stable_alpha("avgpipe", 8) is None
