"""The learning rate of each step, and torch's optimisers over the model's parameters."""

import math
from itertools import pairwise

import pytest
import torch

from txl.errors import ConfigError
from txl.model import ModelConfig, TransformerXL
from txl.training.optim import OptimConfig, learning_rate, make_optimizer


def rates(steps, **options):
    return [learning_rate(OptimConfig(**options), step, steps) for step in range(steps)]


def make(**options):
    sizes = {"vocab_size": 11, "n_layer": 2, "n_head": 2, "d_model": 8, "d_inner": 12, "d_embed": 6}
    return TransformerXL(ModelConfig(**(sizes | options)))


def test_warm_up_applies_from_the_first_step():
    assert rates(6, lr=0.4, warmup_steps=4, schedule="constant") == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])


@pytest.mark.parametrize(
    "schedule, wanted",
    [
        ("constant", {0: 1.0, 50: 1.0, 99: 1.0, 100: 1.0}),
        ("linear", {0: 1.0, 25: 0.8, 50: 0.6, 75: 0.4, 100: 0.2}),
        (
            "cosine",
            {0: 1.0, 25: 0.2 + 0.4 * (1 + math.sqrt(0.5)), 50: 0.6, 75: 0.2 + 0.4 * (1 - math.sqrt(0.5)), 100: 0.2},
        ),
    ],
)
@pytest.mark.parametrize("warmup_steps", [0, 20])
def test_schedules_fall_from_lr_to_min_lr_after_warm_up(schedule, wanted, warmup_steps):
    config = OptimConfig(lr=1.0, min_lr=0.2, schedule=schedule, warmup_steps=warmup_steps)
    for step, rate in wanted.items():
        assert learning_rate(config, warmup_steps + step, warmup_steps + 100) == pytest.approx(rate)


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_the_rate_rises_through_warm_up_and_falls_after_it(schedule):
    found = rates(50, lr=0.3, warmup_steps=10, schedule=schedule)
    assert all(a < b for a, b in pairwise(found[:10]))
    assert all(a > b for a, b in pairwise(found[10:]))
    assert max(found) == found[9] == found[10] == 0.3
    assert 0 < found[-1] < 0.01


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_more_warm_up_than_steps_never_reaches_the_peak(schedule):
    assert rates(5, lr=1.0, warmup_steps=10, schedule=schedule) == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_warm_up_of_all_steps_and_steps_beyond_the_last_have_a_rate(schedule):
    assert rates(4, lr=1.0, warmup_steps=4, schedule=schedule)[-1] == 1.0
    beyond = learning_rate(OptimConfig(lr=1.0, min_lr=0.1, schedule=schedule), 30, 20)
    assert beyond == (1.0 if schedule == "constant" else pytest.approx(0.1))


@pytest.mark.parametrize("untie_r", [False, True])
def test_weight_decay_spares_biases_norms_u_and_v(untie_r):
    model = make(untie_r=untie_r, pre_lnorm=True)
    optimizer = make_optimizer(OptimConfig(weight_decay=0.3), model)
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert len(decay) == sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))
    spared = {name for name, p in model.named_parameters() if decay[id(p)] == 0}
    wanted = {name for name, p in model.named_parameters() if name.endswith(("bias", ".u", ".v")) or "norm" in name}
    assert spared == wanted
    assert {decay[id(p)] for name, p in model.named_parameters() if name not in spared} == {0.3}
    assert sum(name.endswith((".u", ".v")) for name in spared) == (4 if untie_r else 2)


@pytest.mark.parametrize(
    "name, options, reference",
    [
        ("adam", {"betas": (0.8, 0.9)}, lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.8, 0.9), weight_decay=0.2)),
        ("adamw", {"betas": (0.8, 0.9)}, lambda p: torch.optim.AdamW(p, lr=0.1, betas=(0.8, 0.9), weight_decay=0.2)),
        ("sgd", {"momentum": 0.7}, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.7, weight_decay=0.2)),
    ],
)
def test_the_optimisers_are_torchs_own(name, options, reference):
    torch.manual_seed(0)
    ours, theirs = torch.nn.Linear(5, 4, bias=False), torch.nn.Linear(5, 4, bias=False)
    theirs.load_state_dict(ours.state_dict())
    optimizers = [
        make_optimizer(OptimConfig(name=name, lr=0.1, weight_decay=0.2, **options), ours),
        reference(theirs.parameters()),
    ]
    x = torch.randn(3, 5)
    for _ in range(4):
        for layer, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            layer(x).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(ours.weight, theirs.weight)


@pytest.mark.parametrize(
    "options, fragment",
    [
        ({"name": "adagrad"}, "adam, adamw, sgd"),
        ({"schedule": "poly"}, "cosine, linear, constant"),
        ({"lr": -1.0}, "optim.lr"),
        ({"lr": math.inf}, "optim.lr"),
        ({"lr": math.nan}, "optim.lr"),
        ({"warmup_steps": -1}, "optim.warmup_steps"),
        ({"min_lr": -0.1}, "optim.min_lr"),
        ({"clip": -1.0}, "optim.clip"),
        ({"weight_decay": -1.0}, "optim.weight_decay"),
        ({"momentum": -1.0}, "optim.momentum"),
        ({"betas": (0.9,)}, "optim.betas"),
        ({"betas": (0.9, 1.0)}, "optim.betas"),
        ({"betas": (-0.1, 0.9)}, "optim.betas"),
    ],
)
def test_settings_that_cannot_be_are_refused(options, fragment):
    with pytest.raises(ConfigError, match=fragment):
        OptimConfig(**options)
