"""Shapes from the optimizer's second moments."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import emulated
import pytest
import torch
from conftest import generator, special
from engine_cases import isas, native_on
from torch import nn

sys.path.append(str(Path(__file__).parents[1] / "experiments"))
from workers.optimizers import Lion, Shampoo

from gradzip.engines import native_noise, reference_noise
from gradzip.engines.cuda import launch
from gradzip.engines.cuda import noise as kernels
from gradzip.sensitivity.shape import DEEPEST, SecondMoments, shape_of


def by_hand(second: torch.Tensor) -> list[int] | None:
    """Value by value, from the exponent of each."""
    values = second.double().tolist()
    if not all(map(math.isfinite, values)) or not any(values):
        return None
    halves = [(max(math.frexp(v)[1] - 1 + 127, 0) if v >= 2**-126 else 0) >> 1 for v in values]
    return [max(half - max(halves), DEEPEST) for half in halves]


@pytest.mark.parametrize("scale", [1e-30, 1e-10, 1.0, 1e30])
def test_shape_is_half_the_exponent_less_that_of_the_largest(scale: float) -> None:
    second = torch.randn(5000, generator=generator()).mul(4).exp().mul(scale).clamp(max=3e38)
    second[::7] = 0
    found = shape_of(second, torch.empty(5000, dtype=torch.int8))
    assert found is not None
    assert found.tolist() == by_hand(second)
    assert found.max() == 0


def test_odd_second_moments() -> None:
    for second in (special(500).abs().nan_to_num(0.0), torch.full((9,), 1e-41), torch.tensor([0.0, 1e-44])):
        found = shape_of(second, torch.empty(second.numel(), dtype=torch.int8))
        assert found is not None
        assert found.tolist() == by_hand(second)
    for value in (math.nan, math.inf, -1.0):
        assert shape_of(torch.tensor([1.0, value]), torch.empty(2, dtype=torch.int8)) is None
    assert shape_of(torch.zeros(8), torch.empty(8, dtype=torch.int8)) is None
    assert shape_of(torch.zeros(0), torch.empty(0, dtype=torch.int8)) is None


def test_engines_make_the_same_shapes() -> None:
    wide = torch.randn(9000, generator=generator()).mul(4).exp()
    seconds = [wide, wide[:1], wide[:0], wide[3:4100] * 1e-38, torch.full((9,), 1e-41), torch.zeros(70), wide.neg()]
    seconds += [torch.tensor([1.0, value, 3.0]) for value in (math.nan, -math.nan, math.inf, -0.0, 3e38, 0.0)]
    expected = [shape_of(second, torch.empty(second.numel(), dtype=torch.int8)) for second in seconds]

    def call(engine: ModuleType) -> None:
        outs = [torch.full((second.numel() + 64,), 99, dtype=torch.int8) for second in seconds]
        fit = engine.Shaper(seconds, [out[: second.numel()] for out, second in zip(outs, seconds)]).run()
        assert fit == [shape is not None for shape in expected]
        for out, second, shape in zip(outs, seconds, expected):
            assert bool((out[second.numel() :] == 99).all()), "written behind the end"
            assert shape is None or torch.equal(out[: second.numel()], shape)

    call(reference_noise)
    for isa in isas():
        with native_on(isa):
            call(native_noise)


OPTIMIZERS = {
    "Adam": (lambda ps: torch.optim.Adam(ps), "exp_avg_sq"),
    "AdamW": (lambda ps: torch.optim.AdamW(ps, foreach=True), "exp_avg_sq"),
    "NAdam": (lambda ps: torch.optim.NAdam(ps), "exp_avg_sq"),
    "RMSprop": (lambda ps: torch.optim.RMSprop(ps), "square_avg"),
    "Adagrad": (lambda ps: torch.optim.Adagrad(ps), "sum"),
}


def trained(
    make: object, steps: int, device: str = "cpu"
) -> tuple[nn.Module, torch.optim.Optimizer, dict[torch.Tensor, str]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 16, 5))
    model.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stubs lack memory_format
    optimizer = make(model.parameters())  # type: ignore[operator]
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 3, 6, 6, device=device)).square().sum().backward()
        optimizer.step()
    return model, optimizer, {p: name for name, p in model.named_parameters()}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_second_moments_are_found_by_their_key_from_the_fourth_step_on(kind: str) -> None:
    make, key = OPTIMIZERS[kind]
    for steps in (0, 3, 4, 6):
        _, optimizer, names = trained(make, steps)
        source = SecondMoments([optimizer], names)
        assert source.renew() == (steps >= 4)
        for parameter, name in names.items():
            (shape,) = source.of([name])
            if steps < 4:
                assert shape is None
                continue
            assert shape is not None
            second = optimizer.state[parameter][key]
            order = second.permute(0, 2, 3, 1) if second.dim() == 4 else second  # as channels_last lies in memory
            assert shape.tolist() == by_hand(order.reshape(-1))


def matrices(make: object, steps: int) -> tuple[torch.optim.Optimizer, dict[torch.Tensor, str]]:
    """Matrices alone, which is what Muon takes; their rows and columns are of very different sizes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 12, bias=False), nn.Tanh(), nn.Linear(12, 5, bias=False))
    scales = torch.randn(40, generator=generator()).mul(2).exp()
    optimizer = make(model.parameters())  # type: ignore[operator]
    for _ in range(steps):
        optimizer.zero_grad()
        (model(torch.randn(4, 40) * scales) * torch.logspace(-3, 0, 5)).square().sum().backward()
        optimizer.step()
    return optimizer, {p: name for name, p in model.named_parameters()}


def product(rows: list[float], columns: list[float]) -> torch.Tensor:
    """Of factors relative to the largest, each in float32."""
    r, c = ([float(torch.tensor(x / max(factor))) for x in factor] for factor in (rows, columns))
    return torch.tensor([[x * y for y in c] for x in r], dtype=torch.float64)


def norms(momentum: torch.Tensor) -> torch.Tensor:
    """Of rows and columns, by plain loops."""
    rows, columns = ([math.sqrt(sum(v * v for v in line)) for line in side.tolist()] for side in (momentum, momentum.T))
    return product(rows, columns)


def root_of_diagonals(state: dict[str, torch.Tensor]) -> torch.Tensor:
    rows, columns = ([math.sqrt(x) for x in state[f"precond_{side}"].diagonal().tolist()] for side in (0, 1))
    return product(rows, columns)


BY_FACTORS = {  # how to make it; the second moment by hand; how many steps it takes
    "Adafactor of torch": (
        lambda ps: torch.optim.Adafactor(ps),
        lambda state: product(state["row_var"].view(-1).tolist(), state["col_var"].view(-1).tolist()),
        4,
    ),
    "Adafactor of transformers": (
        lambda ps: pytest.importorskip("transformers").Adafactor(ps, lr=1e-3, relative_step=False),
        lambda state: product(state["exp_avg_sq_row"].tolist(), state["exp_avg_sq_col"].tolist()),
        4,
    ),
    "Shampoo": (lambda ps: Shampoo(ps), root_of_diagonals, 4),
    "Lion": (lambda ps: Lion(ps), lambda state: norms(state["exp_avg"]), 1),
    "Muon of torch": (
        lambda ps: torch.optim.Muon(ps) if hasattr(torch.optim, "Muon") else pytest.skip("torch has no Muon"),
        lambda state: norms(state["momentum_buffer"]),
        1,
    ),
}


@pytest.mark.parametrize("kind", BY_FACTORS)
def test_rows_and_columns_are_found_by_their_key(kind: str) -> None:
    make, second, first = BY_FACTORS[kind]
    for steps in (0, 1, 3, 4, 6):
        optimizer, names = matrices(make, steps)
        source = SecondMoments([optimizer], names)
        assert source.renew() == (steps >= first)
        for parameter, name in names.items():
            (shape,) = source.of([name])
            assert (shape is None) == (steps < first)
            if shape is not None:
                assert shape.tolist() == by_hand(second(optimizer.state[parameter]).reshape(-1))  # type: ignore[no-untyped-call]
                assert len(set(shape.tolist())) > 2


@pytest.mark.parametrize("kind", BY_FACTORS)
def test_rows_and_columns_of_any_size_give_the_same_shape(kind: str) -> None:
    """Products of small factors would vanish in float32, and those of large ones overflow."""
    make, _, _ = BY_FACTORS[kind]
    optimizer, names = matrices(make, 5)
    source = SecondMoments([optimizer], names)
    source.renew()
    before = [shape.clone() for shape in source.of(list(names.values())) if shape is not None]
    for power in (-80, 120):
        for parameter in names:
            for key, value in optimizer.state[parameter].items():
                if key != "step":
                    value *= 2.0**power
        source.renew()
        after = source.of(list(names.values()))
        assert all(found is not None and torch.equal(found, shape) for found, shape in zip(after, before))


def test_a_row_of_a_convolution_is_one_output_channel() -> None:
    _, optimizer, names = trained(lambda ps: Lion(ps), 2)
    source = SecondMoments([optimizer], names)
    source.renew()
    weight = next(p for p, name in names.items() if name == "0.weight")
    second = norms(optimizer.state[weight]["exp_avg"].reshape(8, -1)).view(weight.shape)
    (shape,) = source.of(["0.weight"])
    assert shape is not None
    assert shape.tolist() == by_hand(second.permute(0, 2, 3, 1).reshape(-1)), "as channels_last lies in memory"
    assert source.of(["0.bias", "2.bias"]) == [None, None], "a vector has no rows"


def test_a_momentum_of_zeros_gives_no_shape() -> None:
    optimizer, names = matrices(lambda ps: Lion(ps), 1)
    parameter, name = next(iter(names.items()))
    source = SecondMoments([optimizer], names)
    for value, fits in ((0.0, False), (1.0, True), (math.inf, False)):
        optimizer.state[parameter]["exp_avg"].fill_(value)
        source.renew()
        assert (source.of([name]) != [None]) == fits


def test_a_factor_of_another_size_gives_no_shape() -> None:
    optimizer, names = matrices(lambda ps: Shampoo(ps), 4)
    parameter, name = next(iter(names.items()))
    optimizer.state[parameter]["precond_1"] = torch.eye(3)
    source = SecondMoments([optimizer], names)
    source.renew()
    assert source.of([name]) == [None]


def test_optimizers_without_second_moments_have_no_shapes() -> None:
    _, optimizer, names = trained(lambda ps: torch.optim.SGD(ps, lr=0.01, momentum=0.9), 6)
    for source in (SecondMoments([optimizer], names), SecondMoments([], names)):
        assert not source.renew()
        assert source.of(list(names.values())) == [None] * len(names)
        assert source.sums(0).tolist() == [1] * len(names)


def test_shapes_follow_the_state_and_stay_where_they_are() -> None:
    _, optimizer, names = trained(lambda ps: torch.optim.Adam(ps), 4)
    source = SecondMoments([optimizer], names)
    source.renew()
    (before,) = source.of(["2.weight"])
    assert before is not None
    parameter = next(p for p, name in names.items() if name == "2.weight")
    optimizer.state[parameter]["exp_avg_sq"].view(-1)[7] *= 2.0**20
    assert not source.renew()
    (after,) = source.of(["2.weight"])
    assert after is before
    assert after[7] == 0
    optimizer.state[parameter]["exp_avg_sq"].fill_(math.nan)
    assert source.renew()
    assert source.of(["2.weight"]) == [None]


def test_sums_differ_where_shapes_do() -> None:
    _, optimizer, names = trained(lambda ps: torch.optim.Adam(ps), 4)
    source = SecondMoments([optimizer], names)
    source.renew()
    before = [source.sums(step) for step in range(3)]
    assert len(before[0]) == len(source.all_names) == len(source.names)
    assert max(before[0].tolist()) <= 0, "as no tensor is without a shape"
    bias = next(p for p, name in names.items() if name == "2.bias")
    optimizer.state[bias]["exp_avg_sq"] *= torch.tensor([1.0, 1e-3, 1.0, 1e3, 1.0])
    source.renew()
    for step in range(3):
        differs = (source.sums(step) != before[step]).tolist()
        assert differs == [name == "2.bias" for name in source.all_names]


# --- By kernels ------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "cuda":
        yield "cuda"
        return
    emulated.install()
    launch.load_once.cache_clear()
    yield "cpu"
    launch.emulator = None
    launch.load_once.cache_clear()


def test_kernels_make_the_same_shapes(device: str) -> None:
    wide = torch.randn(9000, generator=generator()).mul(4).exp()
    seconds = [wide, wide[:1], wide[:4097] * 1e-38, torch.full((9,), 1e-41), torch.zeros(70), wide.neg()]
    seconds += [torch.tensor([1.0, value, 3.0]) for value in (math.nan, math.inf, -0.0, 3e38, 0.0)]
    there = [second.to(device) for second in seconds]
    shapes = [torch.full((second.numel(),), 99, dtype=torch.int8, device=device) for second in seconds]
    shaper = kernels.Shaper(there, shapes)
    for _ in range(2):
        shaper.run()
        for second, shape in zip(seconds, shapes):
            expected = shape_of(second, torch.empty(second.numel(), dtype=torch.int8))
            assert shape.tolist() == (expected.tolist() if expected is not None else [0] * second.numel())


@pytest.mark.parametrize("kind", [*OPTIMIZERS, "Adafactor", "Lion", "Shampoo", "SGD"])
def test_shapes_on_a_stream_are_those_of_the_host(device: str, kind: str) -> None:
    makes = {name: make for name, (make, _) in OPTIMIZERS.items()}
    makes |= {"Adafactor": lambda ps: torch.optim.Adafactor(ps), "SGD": lambda ps: torch.optim.SGD(ps, 0.1)}
    makes |= {"Lion": lambda ps: Lion(ps), "Shampoo": lambda ps: Shampoo(ps, lr=0.01)}
    model, optimizer, names = trained(makes[kind], 2, device)
    host, stream = SecondMoments([optimizer], names), SecondMoments([optimizer], names, on_stream=True)
    for step in range(6):
        if step == 4:  # loading a state moves all tensors; the step after it changes the new ones alone
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert host.renew() == stream.renew()
        for name, expected in zip(names.values(), host.of(list(names.values()))):
            (found,) = stream.of([name])
            assert (found is None) == (expected is None)
            assert found is None or torch.equal(found.cpu(), expected.cpu())
        optimizer.zero_grad()
        model(torch.randn(4, 3, 6, 6).to(device)).square().sum().backward()
        optimizer.step()
    assert bool(stream.names) == (kind != "SGD")


def _replace(state: Any, p: torch.Tensor) -> None:
    state[p] = {key: value.clone() for key, value in state[p].items()}


def _replace_field(state: Any, p: torch.Tensor) -> None:
    state[p]["exp_avg_sq"] = state[p]["exp_avg_sq"] * 4


def _remove(state: Any, p: torch.Tensor) -> None:
    del state[p]


def _empty(state: Any, p: torch.Tensor) -> None:
    state[p].clear()


def _remove_field(state: Any, p: torch.Tensor) -> None:
    del state[p]["exp_avg_sq"]


def _swap(state: Any, p: torch.Tensor) -> None:
    other = next(q for q in state if q is not p and state[q]["exp_avg_sq"].numel() != p.numel())
    state[p], state[other] = state[other], state[p]


@pytest.mark.parametrize("change", [_replace, _replace_field, _remove, _empty, _remove_field, _swap])
def test_shapes_on_a_stream_follow_a_state_that_is_changed_by_hand(device: str, change: Any) -> None:
    _, optimizer, names = trained(lambda ps: torch.optim.AdamW(ps), 6, device)
    sources = [SecondMoments([optimizer], names, on_stream) for on_stream in (False, True)]
    whole = copy.deepcopy(optimizer.state_dict())
    parameter = list(names)[2]
    for turn in range(4):  # as it was, changed, filled in again where the entry had been, and all of it loaded again
        if turn == 1:
            change(optimizer.state, parameter)
            for state in optimizer.state.values():
                if "exp_avg_sq" in state:
                    state["exp_avg_sq"] *= 2.0 ** torch.arange(state["exp_avg_sq"].numel(), device=device).view(
                        state["exp_avg_sq"].shape
                    ).remainder(20)
        if turn == 2 and change in (_empty, _remove_field):
            moment = torch.rand_like(parameter)
            optimizer.state[parameter] |= {"exp_avg_sq": moment, "step": torch.tensor(9.0)}
        if turn == 3:
            optimizer.load_state_dict(whole)
        for source in sources:
            source.renew()
        for name, parts in zip(names.values(), zip(*(source.of(list(names.values())) for source in sources))):
            host, stream = parts
            assert (host is None) == (stream is None), (turn, name)
            assert host is None or torch.equal(host.cpu(), stream.cpu()), (turn, name)


@pytest.mark.parametrize("fused", [False, True])
def test_kernels_are_prepared_no_more_for_a_parameter_that_stays_below_four_updates(
    device: str, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would make the host wait for the GPU in every step. `fused`: updates are counted on the GPU."""
    used, unused = (nn.Parameter(torch.randn(40, device=device)) for _ in range(2))
    optimizer = torch.optim.AdamW([used, unused], fused=fused)
    source = SecondMoments([optimizer], {used: "used", unused: "unused"}, on_stream=True)
    prepared, prepare = [0], source._prepare

    def counting() -> None:
        prepared[0] += 1
        prepare()

    monkeypatch.setattr(source, "_prepare", counting)
    for step in range(10):
        used.grad = torch.ones_like(used)
        unused.grad = torch.ones_like(unused) if step < 2 or step == 8 else None
        optimizer.step()
        before = prepared[0]
        source.renew()
        assert source.names == (["used"] if step >= 3 else [])
        if step > 3 and step != 8:
            assert prepared[0] == before
    for _ in range(2):
        unused.grad = torch.ones_like(unused)
        optimizer.step()
        source.renew()
    assert source.names == ["used", "unused"], "it counts when it gets there"
