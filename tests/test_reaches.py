"""Paper mode's reaches against GComp's Table 2 and against the optimizers themselves."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from promise import KINDS, TYPICAL, Setting, step_in_double
from torch import nn
from torch.optim import SGD, Adagrad, Adam, RMSprop

import gradzip
from gradzip import GradzipWarning
from gradzip.engines.layout import EXACT
from gradzip.sensitivity import survey


@pytest.fixture(autouse=True)
def forgotten_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "_warned", set())


@pytest.fixture
def parameter() -> nn.Parameter:
    return nn.Parameter(torch.ones(4))


@pytest.mark.parametrize("past", [0, 3])
@pytest.mark.parametrize("name", ["sgd", "momentum", "nesterov"])
def test_linear_optimizers_reach_as_far_as_their_update_says(name: str, past: int) -> None:
    setting = Setting(KINDS[name], {**TYPICAL[name], "weight_decay": 0.01}, past=past)
    zero = np.zeros(setting.size)
    after_zero = step_in_double(setting.optimizer, zero)
    slope = np.abs(step_in_double(setting.optimizer, zero + 1e6) - after_zero) / 1e6
    reach = gradzip.reaches(setting.optimizer)[setting.parameter].numpy()
    known = setting.theta != 0
    exact = np.floor(np.log2(np.abs(after_zero[known] / slope[known])))
    assert (np.abs(reach[known] - exact) <= 1).all()
    assert (reach[known] == exact).mean() > 0.95  # a slope measured this way may differ in its last bits


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("past", [0, 1, 10])
@pytest.mark.parametrize("name", ["adagrad", "rmsprop", "adam", "adamw"])
def test_adaptive_optimizers_never_reach_further_than_the_metric(
    name: str, past: int, decay: float, amsgrad: bool
) -> None:
    """The metric with the denominator that then really occurs is at least the one used."""
    options = {**TYPICAL[name], "weight_decay": decay}
    if name.startswith("adam"):
        options["amsgrad"] = amsgrad
    setting = Setting(KINDS[name], options, past=past, size=2048)
    theta = setting.theta.astype(np.float64)
    reach = gradzip.reaches(setting.optimizer)[setting.parameter].numpy()
    gradient = setting.gradients(np.full(setting.size, EXACT, np.int8))[0].astype(np.float64)
    metric = true_metric(setting, theta, gradient)
    cut = reach > EXACT
    assert (np.exp2(reach[cut].astype(float)) <= metric[cut] * (1 + 1e-9)).all()
    if past == 10:
        assert cut.mean() > 0.25
        close = np.exp2(reach[cut].astype(float)) > metric[cut] / 16
        assert close.mean() > 0.2


def true_metric(setting: Setting, theta: np.ndarray, g: np.ndarray) -> np.ndarray:
    """|A / B| as GComp's Table 2 prints it, with the denominator after the step."""
    o, group = setting.optimizer, setting.optimizer.param_groups[0]
    state = {k: v.double().numpy() for k, v in o.state[setting.parameter].items()} if o.state else {}
    lr, lam, eps, t = group["lr"], group["weight_decay"], group["eps"], float(state.get("step", 0)) + 1
    decoupled = group.get("decoupled_weight_decay", False)
    seen = g if decoupled else g + lam * theta
    if setting.kind is Adagrad:
        return np.abs(theta * (np.sqrt(state["sum"] + seen**2) + eps) / lr - lam * theta)
    if setting.kind is RMSprop:
        v = group["alpha"] * state.get("square_avg", 0) + (1 - group["alpha"]) * seen**2
        return np.abs(theta * (np.sqrt(v) + eps) / lr - lam * theta)
    b1, b2 = group["betas"]
    v = b2 * state.get("exp_avg_sq", 0) + (1 - b2) * seen**2
    if group["amsgrad"]:
        v = np.maximum(v, state.get("max_exp_avg_sq", 0))
    denominator = np.sqrt(v / (1 - b2**t)) + eps
    start = theta * (1 - lr * lam) if decoupled else theta
    rest = start * denominator * (1 - b1**t) - lr * b1 * state.get("exp_avg", 0)
    return np.abs(rest / (lr * (1 - b1)) - (0 if decoupled else lam * theta))


def test_momentum_that_outweighs_the_parameter_cuts_nothing() -> None:
    p = nn.Parameter(torch.tensor([1e-6, 1.0]))
    optimizer = Adam([p], lr=1e-3)
    p.grad = torch.ones(2)
    optimizer.step()
    p.data.copy_(torch.tensor([1e-6, 1.0]))
    small, large = gradzip.reaches(optimizer)[p].tolist()
    assert small == EXACT
    assert large > 5


def test_paper_mode_has_nothing_for_those_it_cannot_analyse(parameter: nn.Parameter) -> None:
    with pytest.warns(GradzipWarning, match="NAdam"):
        assert gradzip.reaches(torch.optim.NAdam([parameter]))[parameter].tolist() == [EXACT] * 4
    with pytest.warns(GradzipWarning, match="centered"):
        assert gradzip.reaches(RMSprop([parameter], centered=True))[parameter].tolist() == [EXACT] * 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert gradzip.reaches(SGD([parameter], lr=0.0))[parameter].tolist() == [EXACT] * 4
