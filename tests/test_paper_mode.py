"""Paper mode's reaches against GComp's Table 2 and against the optimizers themselves."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from promise import KINDS, TYPICAL, Setting, step_in_double
from torch import nn
from torch.optim import SGD, Adagrad, Adam, RMSprop

import gradzip
from gradzip import Context, GradzipWarning, engines, parse
from gradzip.codecs.gcomp import paper_levels, reach_exponents
from gradzip.engines.layout import EXACT
from gradzip.exchange.coding import Message
from gradzip.exchange.compiler import compile_route
from gradzip.exchange.interpreter import Interpreter
from gradzip.exchange.message_codecs import codes_messages
from gradzip.exchange.topology import Topology
from gradzip.routes import Route
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
    exact = np.abs(after_zero[known] / slope[known])
    assert (np.abs(np.log2(reach[known] / exact)) <= 1).all()
    assert np.isclose(reach[known], exact, rtol=1e-5).mean() > 0.95  # a slope measured this way may differ a little


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
    cut = reach > 0
    assert (reach[cut] <= metric[cut] * (1 + 1e-9)).all()
    if past == 10:
        assert cut.mean() > 0.25
        close = reach[cut] > metric[cut] / 16
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
    assert small == 0
    assert large > 32


def test_paper_mode_has_nothing_for_those_it_cannot_analyse(parameter: nn.Parameter) -> None:
    with pytest.warns(GradzipWarning, match="NAdam"):
        assert gradzip.reaches(torch.optim.NAdam([parameter]))[parameter].tolist() == [0.0] * 4
    with pytest.warns(GradzipWarning, match="centered"):
        assert gradzip.reaches(RMSprop([parameter], centered=True))[parameter].tolist() == [0.0] * 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert gradzip.reaches(SGD([parameter], lr=0.0))[parameter].tolist() == [0.0] * 4


@pytest.mark.parametrize("name", list(KINDS))
def test_reaches_of_slices_are_those_of_the_whole_parameter(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where parameter and moments lie in memory in another order than that of their indices."""
    p = nn.Parameter(torch.randn(6, 5, 4, 3).to(memory_format=torch.channels_last))
    optimizer = KINDS[name]([p], **TYPICAL[name])
    for _ in range(2):
        p.grad = torch.randn_like(p)
        optimizer.step()
    whole = gradzip.reaches(optimizer)[p]
    monkeypatch.setattr("gradzip.sensitivity.paper.SLICE", 7)
    assert torch.equal(gradzip.reaches(optimizer)[p], whole)
    assert (whole > 0).any()


# --- GComp's rule: level n if |delta| > 2^n ---------------------------------------------------------------------------

normal = st.floats(2.0**-100, 2.0**80, width=32)


@given(st.lists(st.tuples(normal, st.booleans(), st.integers(-30, 30), normal), min_size=1, max_size=50))
def test_frames_cut_where_delta_exceeds_the_power_of_two(
    cases: list[tuple[float, bool, int, float]],
) -> None:
    """Exactly there: a reach of 2^n |g| cuts fewer bits, the next float32 above it cuts n."""
    x = torch.tensor([-g if negative else g for g, negative, _, _ in cases])
    on_edge = x.abs() * torch.tensor([2.0**n for _, _, n, _ in cases])
    above = torch.nextafter(on_edge, torch.full_like(on_edge, torch.inf))
    for reach in (on_edge, above, torch.tensor([r for *_, r in cases])):
        delta = reach.double() / x.double().abs()
        dropped = 6 * torch.stack([(delta > 2.0**n).to(torch.int8) for n in (6, 12, 18)]).sum(0, dtype=torch.int8)
        step = torch.exp2(torch.frexp(x.double()).exponent - 1.0 - 23 + dropped)
        expected = ((x.double() / step).trunc() * step).float()
        with engines.use("reference"):
            codec, ctx = parse("gcomp:mode=paper"), Context(floor=reach)
            assert torch.equal(codec.decode(codec.encode(x, ctx), Context()), expected)
        assert torch.equal(6 * paper_levels(x, reach), dropped)


def test_rule_cuts_more_than_powers_of_two_below_the_reach_and_never_beyond_two_ulps() -> None:
    """The reach rounded down to a power of two, as it was once, cuts half a bit less of a Gaussian gradient."""
    rng = torch.Generator().manual_seed(0)
    theta, g = torch.randn(1 << 14, generator=rng) * 0.02, torch.randn(1 << 14, generator=rng) * 1e-4
    p = nn.Parameter(theta.clone())
    optimizer = SGD([p], lr=0.1)
    reach = gradzip.reaches(optimizer)[p].detach()
    floor = torch.exp2(torch.frexp(reach).exponent - 1.0)
    published, coarse = paper_levels(g, reach), paper_levels(g, floor)
    assert (published >= coarse).all()
    assert 0.2 < 6 * float((published - coarse).float().mean()) < 1.2
    codec = parse("gcomp:mode=paper")
    cut = codec.decode(codec.encode(g, Context(floor=reach)), Context())
    before, after = theta - 0.1 * g, theta - 0.1 * cut
    last_place = torch.exp2(torch.frexp(torch.maximum(theta.abs(), before.abs())).exponent - 24.0)
    assert float(((before - after).abs() / last_place).max()) <= 2


def test_values_that_are_not_finite_and_zeros_lose_nothing() -> None:
    x, reach = torch.tensor([torch.nan, torch.inf, 0.0, 1.0]), torch.full((4,), 2.0**40)
    assert reach_exponents(x, reach).tolist()[:2] == [EXACT, EXACT]
    assert paper_levels(x, reach).tolist() == [0, 0, 3, 3]


def test_means_are_cut_by_the_published_rule_as_well() -> None:
    """A mean is divided before it is coded, so that it is compared with the reach as a gradient is."""
    world, size, codec = 4, 4096, parse("gcomp:mode=paper")
    rng = torch.Generator().manual_seed(3)
    gradients = [torch.randn(size, generator=rng) for _ in range(world)]
    reach = torch.randn(size, generator=rng).abs() * 2.0 ** torch.randint(0, 24, (size,), generator=rng)
    whole = codes_messages(codec, "alltoall")
    assert whole is not None
    topology = Topology(0, tuple((rank,) for rank in range(world)))
    route = Route.parse("alltoall")
    program = compile_route(whole.text, route, ["weight"], [size], torch.float32, topology, whole.codes_sums)
    messages = [Message(program.names, torch.float32, rank, world) for rank in range(world)]
    for message in messages:
        message.floors = [reach]
    means = Interpreter(program, whole, messages).run([[gradient.clone()] for gradient in gradients])

    def cut(values: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        bits = 6 * paper_levels(values, by).to(torch.int32)
        return (values.view(torch.int32) >> bits << bits).view(torch.float32)

    expected = torch.empty(size)
    for part in (part for owner in range(world) for part in program.dealt.of_owner(owner)):
        here, total = slice(part.start, part.stop), torch.zeros(part.numel)
        for gradient in gradients:
            total += cut(gradient[here], reach[here])
        expected[here] = cut(total / world, reach[here])
    assert (paper_levels(expected, reach) > 0).float().mean() > 0.5
    assert all(torch.equal(mean, expected) for (mean,) in means)
