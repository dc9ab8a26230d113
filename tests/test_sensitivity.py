"""The promise of near mode for every optimizer it knows, its floors, and who gets none."""

from __future__ import annotations

import math
import struct
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from promise import KINDS, TYPICAL, Setting, exchange
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

import gradzip
from gradzip import Floor, GradzipWarning, engines
from gradzip.engines.layout import COARSEST, EXACT, Job
from gradzip.engines.reference import map_values
from gradzip.sensitivity import bounds, survey
from gradzip.sensitivity.bounds import growth

WORLDS = (1, 4, 64)


@pytest.fixture(autouse=True)
def forgotten_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "_warned", set())


def powers(low: float, high: float) -> st.SearchStrategy[float]:
    """Numbers of any magnitude between 10^low and 10^high; round ones too."""
    return st.one_of(
        st.floats(low, high).map(lambda e: 10.0**e),
        st.integers(math.ceil(low), math.floor(high)).map(lambda e: 10.0**e),
        st.integers(math.ceil(low * 3.33), math.floor(high * 3.32)).map(lambda e: 2.0**e),
    )


def fractions(high: float) -> st.SearchStrategy[float]:
    return st.one_of(st.sampled_from([x for x in (0.0, 0.5, 0.9, 0.95, 0.99, 0.999) if x <= high]), st.floats(0, high))


@st.composite
def steps_of(draw: st.DrawFn, name: str, world: int) -> Setting:
    """An optimizer of that name with any hyper-parameters, at any point of training."""
    theta_scale = 2.0 ** draw(st.sampled_from([0, 0, 0, -20, 20, -90, 60]))
    options: dict[str, Any] = {
        "lr": draw(powers(-6, 1)),
        "weight_decay": draw(st.one_of(st.just(0.0), powers(-5, 0))),
        "maximize": draw(st.booleans()),
    }
    if name in ("momentum", "nesterov"):
        options["momentum"] = draw(fractions(0.999).filter(bool))
        options["nesterov"] = name == "nesterov"
        if name == "momentum":
            options["dampening"] = draw(fractions(0.999))
    if name in ("adagrad", "rmsprop", "adam", "adamw"):
        options["lr"] *= theta_scale  # their steps are about as long as the learning rate, whatever the gradient
        options["eps"] = draw(powers(-12, -2))
    if name == "adagrad":
        options["lr_decay"] = draw(st.sampled_from([0.0, 1e-3, 1.0]))
        options["initial_accumulator_value"] = draw(st.one_of(st.just(0.0), powers(-8, 0)))
    if name == "rmsprop":
        options["alpha"] = draw(fractions(1.0))
        options["momentum"] = draw(st.one_of(st.just(0.0), fractions(0.99)))
    if name in ("adam", "adamw"):
        b2 = draw(st.one_of(st.sampled_from([0.9, 0.95, 0.99, 0.999, 0.9999]), st.floats(0.1, 0.9999)))
        options["betas"] = (draw(fractions(0.99).filter(lambda b1: b1 * b1 < b2)), b2)
        options["amsgrad"] = draw(st.booleans())
    return Setting(
        KINDS[name],
        options,
        past=draw(st.sampled_from([0, 0, 1, 2, 3, 5, 10, 40])),
        theta_scale=theta_scale,
        ulps=draw(st.sampled_from([1, 1, 2, 16, 300, 65536])),
        scale=draw(st.sampled_from([1.0, 1.0, 65536.0, 1000.0, 0.125])),
        world=world,
        seed=draw(st.integers(0, 2**32 - 1)),
    )


# --- The promise -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
def test_coded_gradients_move_no_parameter_by_more_than_the_ulps_asked_for(
    name: str, world: int, data: st.DataObject
) -> None:
    setting = data.draw(steps_of(name, world))
    distance, noise = setting.distances(setting.floors())
    assert (distance <= setting.ulps * (1 + 1e-9) + noise).all()


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", KINDS)
def test_grids_four_times_as_coarse_would_break_the_promise(name: str, world: int) -> None:
    """So the bound is not loose, and the test above can fail."""
    setting = Setting(KINDS[name], TYPICAL[name], past=20, world=world, size=2048)
    distance, noise = setting.distances(setting.floors())
    half = 1 if world > 1 else 0.5  # one rank alone rounds only once
    assert 0.3 * half < distance[noise < 1e-3].max() <= half + 1e-3
    broken, noise = setting.distances(setting.floors(ulps=4))
    assert broken[noise < 1e-3].max() > 1


@pytest.mark.parametrize("name", KINDS)
def test_first_step(name: str) -> None:
    setting = Setting(KINDS[name], TYPICAL[name], world=4)
    assert not setting.optimizer.state or name == "adagrad"
    distance, noise = setting.distances(setting.floors())
    assert (distance <= 1 + noise).all()


def test_first_step_with_dampening_counts_the_gradient_in_full() -> None:
    options = {"lr": 1.0, "momentum": 0.9, "dampening": 0.75}
    first, later = (Setting(SGD, options, past=past).floors() for past in (0, 1))
    theta = Setting(SGD, options).theta != 0
    assert (later[theta] == first[theta] + 2).all()


def test_betas_that_a_scheduler_moved_are_covered() -> None:
    parameter = nn.Parameter(torch.ones(1))
    optimizer = AdamW([parameter], lr=1e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=100, base_momentum=0.5)
    worst = 0.0
    for _ in range(60):
        (rule,) = gradzip.rules(optimizer).values()
        assert rule is not None
        parameter.grad = torch.full((1,), 1e-3)
        state = optimizer.state[parameter]
        if state:
            (b1, b2), v = optimizer.param_groups[0]["betas"], float(state["exp_avg_sq"])
            pull = b1 * abs(float(state["exp_avg"])) * math.sqrt(1 - b2) / ((1 - b1) * math.sqrt(b2 * v))
            worst = max(worst, pull)
            case = next(case for _, case in survey.survey(optimizer) if case)
            assert pull <= (bounds._pull(case) or 0) * (1 + 1e-6)
        optimizer.step()
        scheduler.step()
    assert worst > 1


def test_growth_is_the_largest_value_of_the_sensitivity() -> None:
    x = np.linspace(-20, 20, 2_000_001)
    for b1, b2 in ((0.0, 0.5), (0.5, 0.9), (0.9, 0.999), (0.9, 0.95), (0.99, 0.9999)):
        pull = b1 / math.sqrt(b2 - b1 * b1)
        # The derivative of m / sqrt(v), m and v as far apart as the past allows, in units of its value at g = 0.
        brute = np.abs(1 - pull * x / (1 + x**2) - x**2 / (1 + x**2)) / np.sqrt(1 + x**2)
        assert growth(pull) == pytest.approx(brute.max(), rel=1e-6)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(world=st.sampled_from([1, 2, 3, 4, 7, 64]), seed=st.integers(0, 2**32 - 1))
def test_the_emulated_exchange_is_that_of_the_format(world: int, seed: int) -> None:
    """Float32 sums in rank order and the reference mapping, where the sums have fewer than 2^24 steps."""
    rng = np.random.default_rng(seed)
    floors = rng.integers(-60, 0, 200).astype(np.int64)
    ranks = (rng.uniform(-(2**16), 2**16, (world, 200)) * np.exp2(floors)).astype(np.float32)
    total = np.zeros(200, np.float32)
    for rank in ranks:
        total += map_values(rank.view(np.uint32), Job("near"), floors).view(np.float32)
    shifted = floors + (world.bit_length() - 1)
    mean = map_values(total.view(np.uint32), Job("near"), shifted).view(np.float32).astype(np.float64) / world
    np.testing.assert_array_equal(exchange(ranks, floors), mean)
    assert (np.abs(mean - ranks.astype(np.float64).mean(0)) <= np.exp2(floors)).all()


# --- Floors as they are computed ---------------------------------------------------------------------------------


def field_of(x: float) -> int:
    return struct.unpack("<I", struct.pack("<f", x))[0] >> 23 & 255


def slow_floor(theta: float, second: float | None, c0: int, c1: int, c2: int) -> int:
    if field_of(theta) == 0:
        return EXACT
    f = field_of(theta) + c0
    if second is not None:
        f += math.floor(max(field_of(second) + c1, c2) / 2)
    return EXACT if f < -127 else min(f, COARSEST)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.floats(width=32), st.floats(0, width=32)), min_size=1, max_size=20),
    st.booleans(),
    st.integers(-400, 200),
    st.integers(-300, 300),
    st.integers(-300, 300),
)
def test_floor_tensor_equals_the_slow_formula(
    pairs: list[tuple[float, float]], with_second: bool, c0: int, c1: int, c2: int
) -> None:
    theta, second = (torch.tensor(column) for column in zip(*pairs))
    floor = Floor(theta, second if with_second else None, c0, c1, c2)
    expected = [slow_floor(t, s if with_second else None, c0, c1, c2) for t, s in pairs]
    assert floor.tensor().tolist() == expected


def test_sgd_floors_by_hand() -> None:
    """lr 1/8: a step of 2^f moves theta by 2^(f-3), and ulp(1) is 2^-23."""
    p = nn.Parameter(torch.tensor([1.0, -1.999, 2.0, 0.0, 1e-40]))
    assert gradzip.floors(SGD([p], lr=0.125))[p].tolist() == [-20, -20, -19, EXACT, EXACT]
    assert gradzip.floors(SGD([p], lr=0.125), ulps=256, scale=4.0)[p].tolist() == [-10, -10, -9, EXACT, EXACT]


def test_groups_have_their_own_learning_rate() -> None:
    a, b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2))
    groups: list[dict[str, Any]] = [{"params": [a]}, {"params": [b], "lr": 0.25}]
    result = gradzip.floors(SGD(groups, lr=1.0))
    assert result[a].tolist() == [-23] * 3
    assert result[b].tolist() == [[-21] * 2] * 2


@pytest.mark.parametrize("name", KINDS)
def test_tensors_as_hyper_parameters_and_other_flags_change_nothing(name: str) -> None:
    plain = Setting(KINDS[name], TYPICAL[name], past=3)
    tensors: dict[str, Any] = {**TYPICAL[name], "lr": torch.tensor(TYPICAL[name]["lr"]), "foreach": False}
    flagged = Setting(KINDS[name], tensors, past=3)
    flagged.optimizer.param_groups[0]["differentiable"] = True
    np.testing.assert_array_equal(plain.floors(), flagged.floors())


def test_rules_lie_in_memory_order_and_floors_in_the_parameters_shape() -> None:
    values = torch.exp2(torch.arange(24.0)).view(2, 3, 2, 2)
    row_major, channels_last = nn.Parameter(values), nn.Parameter(values.to(memory_format=torch.channels_last))
    for p in (row_major, channels_last):
        p.grad = values.sqrt().to(memory_format=torch.preserve_format)
    optimizer = Adam([row_major, channels_last], lr=1e-3)
    optimizer.step()
    rule, floors = gradzip.rules(optimizer)[channels_last], gradzip.floors(optimizer)
    assert torch.equal(floors[row_major], floors[channels_last])
    assert rule is not None
    assert rule.theta.data_ptr() == channels_last.data_ptr()
    in_memory = floors[channels_last].permute(0, 2, 3, 1).reshape(-1)
    assert torch.equal(rule.tensor(), in_memory)
    assert not torch.equal(rule.tensor(), floors[row_major].reshape(-1))


def test_floors_serve_encode_and_decode() -> None:
    setting = Setting(AdamW, TYPICAL["adamw"], past=5, size=5000)
    floors = gradzip.floors(setting.optimizer)[setting.parameter]
    gradient = torch.from_numpy(setting.gradients(floors.numpy())[0])
    with engines.use("reference"):
        frame = gradzip.encode(gradient, "gcomp", floor=floors)
        decoded = gradzip.decode(frame, floor=gradzip.rules(setting.optimizer)[setting.parameter])
    np.testing.assert_array_equal(decoded.double().numpy(), exchange(gradient[None].numpy(), floors.numpy()))


@pytest.mark.gpu
def test_fused_optimizers_that_keep_their_steps_on_the_device() -> None:
    found = []
    for device in ("cpu", "cuda"):
        parameters = [nn.Parameter(torch.linspace(-1, 1, 100, device=device) ** 3) for _ in range(2)]
        optimizer = AdamW(parameters, lr=1e-3, fused=True)
        for p in (parameters[0], *parameters):  # the first one twice
            p.grad = torch.full_like(p, 0.01)
            optimizer.step()
            p.grad = None
        found.append([floor.cpu() for floor in gradzip.floors(optimizer).values()])
    assert all(torch.equal(a, b) for a, b in zip(*found))


def test_step_counts_of_a_device_come_in_one_transfer() -> None:
    assert survey.fetch([torch.tensor(3.0), torch.tensor([5.0])]) == [3.0, 5.0]


# --- Who stays lossless ------------------------------------------------------------------------------------------


def lossless(optimizer: Optimizer) -> bool:
    return all(rule is None for rule in gradzip.rules(optimizer).values()) and all(
        bool((floor == EXACT).all()) for floor in gradzip.floors(optimizer).values()
    )


@pytest.fixture
def parameter() -> nn.Parameter:
    return nn.Parameter(torch.ones(4))


def test_an_unknown_optimizer_is_lossless_and_warns_once(parameter: nn.Parameter) -> None:
    with pytest.warns(GradzipWarning, match="torch.optim.nadam.NAdam") as caught:
        assert lossless(torch.optim.NAdam([parameter]))  # asks twice
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert lossless(torch.optim.NAdam([parameter]))


def test_a_subclass_is_unknown(parameter: nn.Parameter) -> None:
    class Mine(Adam):
        pass

    with pytest.warns(GradzipWarning, match="Mine"):
        assert lossless(Mine([parameter]))


class Wrapper(Optimizer):
    """As Accelerate wraps optimizers."""

    def __init__(self, optimizer: Optimizer):
        self.optimizer = optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]  # as Accelerate does it
        return self.optimizer.param_groups


def test_wrappers_are_unwrapped(parameter: nn.Parameter) -> None:
    inner = SGD([parameter], lr=0.125)
    assert gradzip.floors(Wrapper(Wrapper(inner)))[parameter].tolist() == [-20] * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64])
def test_only_float32_parameters_have_floors(dtype: torch.dtype, parameter: nn.Parameter) -> None:
    other = nn.Parameter(torch.ones(3, dtype=dtype))
    optimizer = SGD([parameter, other], lr=0.125)
    with pytest.warns(GradzipWarning, match=str(dtype)):
        result = gradzip.floors(optimizer)
    assert result[other].tolist() == [EXACT] * 3
    assert result[parameter].tolist() == [-20] * 4


def test_sparse_gradients_are_lossless() -> None:
    table = nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([1, 3])).sum().backward()
    with pytest.warns(GradzipWarning, match="sparse"):
        assert lossless(SGD(table.parameters(), lr=0.1))


@pytest.mark.parametrize(
    ("kind", "options", "name"),
    [
        (RMSprop, {"centered": True}, "centered"),
        (RMSprop, {"alpha": 1.5}, "alpha above 1"),
        (Adam, {"betas": (0.9, 0.81)}, r"beta1\^2 >= beta2"),
        (Adam, {"betas": (0.9, 0.9999999)}, "beta2="),
        (Adam, {"eps": 0.0}, "eps=0"),
        (Adagrad, {"eps": 1e-25}, "eps=1e-25"),
    ],
)
def test_where_no_bound_holds_it_is_lossless_and_says_so(
    kind: type[Optimizer], options: dict[str, Any], name: str, parameter: nn.Parameter
) -> None:
    optimizer = kind([parameter], lr=1e-3, **options)  # type: ignore[call-arg]
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with pytest.warns(GradzipWarning, match=name) as caught:
        assert lossless(optimizer)
    assert len(caught) == 1


@pytest.mark.parametrize("name", KINDS)
def test_a_learning_rate_of_zero_is_lossless(name: str) -> None:
    """It leaves the parameter alone, but not the state."""
    assert lossless(Setting(KINDS[name], {**TYPICAL[name], "lr": 0.0}, past=1).optimizer)


@pytest.mark.parametrize("bad", [{"ulps": 0}, {"ulps": math.inf}, {"scale": 0.0}, {"scale": math.nan}])
def test_nonsense_is_refused(bad: dict[str, float], parameter: nn.Parameter) -> None:
    with pytest.raises(gradzip.Unsupported, match=next(iter(bad))):
        gradzip.floors(SGD([parameter], lr=0.1), **bad)
