"""experiments/workers/noise.py: the vectorised quantiser does what one value at a time does, bit for bit."""

from __future__ import annotations

import hashlib
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import same_bits

sys.path.append(str(Path(__file__).parent.parent / "experiments"))
from workers import noise

CPU = torch.device("cpu")
SHAPES = {"a.weight": (70, 130), "b.bias": (300,), "c.weight": (17, 1000), "zero": (5000,), "one": (1,)}


def naive_squares(values: np.ndarray) -> float:
    """Block by block, lane by lane, as the format says."""
    return naive_sum([float(x) ** 2 if math.isfinite(x) else 0.0 for x in values.astype(np.float64)])


def naive_sum(numbers: list[float]) -> float:
    while len(numbers) > 1:
        sums = []
        for start in range(0, len(numbers), 4096):
            lanes = [0.0] * 32
            for i, number in enumerate(numbers[start : start + 4096]):
                lanes[i % 32] += number
            for half in (16, 8, 4, 2, 1):
                lanes = [lanes[j] + lanes[j + half] for j in range(half)]
            sums.append(lanes[0])
        numbers = sums
    return numbers[0]


def mix(x: int) -> int:
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ (x >> shift)) * factor & 0xFFFFFFFF
    return x ^ (x >> 16)


def naive_rounding(
    x: np.ndarray, level: np.float32, d: np.ndarray, seed: int, step: int, name: str, hop: str, offset: int
) -> np.ndarray:
    key = hashlib.blake2b(f"{seed}/{name}/{hop}/0".encode(), digest_size=8).digest()
    k0, k1 = int.from_bytes(key[:4], "little"), int.from_bytes(key[4:], "little")
    k0, k1 = mix(k0 ^ mix(step)), mix((k1 + step * 0x9E3779B9) % 2**32)
    out = np.zeros_like(x)
    if level == 0:
        return out
    inverse = np.float32(1.0 / np.float64(level))
    for i, value in enumerate(x):
        t = np.float32(value * inverse) * np.float32(2.0 ** -int(d[i]))
        q = t
        if not abs(t) >= 2.0**23:
            k = np.floor(t)
            h24 = ((mix(i ^ k0) + k1 + offset) % 2**32) >> 8
            q = np.float32(k + (int(np.float32(t - k) * np.float32(2.0**24)) + h24 >= 2**24))
        out[i] = np.float32(q * level) * np.float32(2.0 ** int(d[i]))
    return out


def naive_mean(x: list[np.ndarray], d: np.ndarray, budget: float, seed: int, step: int, name: str) -> np.ndarray:
    world, n = len(x), len(x[0])
    weight = sum(4 ** (int(e) + 12) for e in d) / 4**12
    levels = []
    for own in x:
        a = naive_squares(own)
        level = np.float32(math.sqrt(((budget * (6.0 * world / (world + 1))) * a) / weight))
        levels.append(max(level, np.float32(2.0**-126)) if a else np.float32(0))
    total = 0.0
    for level in levels:
        total += float(level) ** 2
    of_sum = np.float32(math.sqrt(((world + 1) / (2.0 * world)) * total))
    part = -(-n // (world * 128)) * 128
    hashed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little") % world
    owners = np.full(n, hashed) if n < 128 * world else (hashed + np.arange(n) // part) % world
    result: np.ndarray | None = None
    for rank, own in enumerate(x):
        offset = rank * 2**32 // world
        sent = np.where(owners == rank, own, naive_rounding(own, levels[rank], d, seed, step, name, "own", offset))
        result = sent if result is None else result + sent
    assert result is not None
    return naive_rounding(result, of_sum, d, seed, step, name, "sum", 0) / np.float32(world)


def stack(layout: noise.Layout, runs: int, seed: int = 0) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    x = torch.zeros(runs, layout.world, layout.length)
    for name, view in zip(layout.names, layout.views(x)):
        if name != "zero":
            scale = torch.rand(view.shape, generator=rng).pow(4)
            view.copy_(torch.randn(view.shape, generator=rng) * scale * 1e-3)
    return x


def moments(layout: noise.Layout, runs: int) -> torch.Tensor:
    return noise.plain_mean(stack(layout, runs, 5)).square()


def test_sums_of_squares_are_the_naive_ones_bit_for_bit() -> None:
    layout = noise.Layout({"large": (4099, 4200), "small": (3, 5), "odd": (12345,)}, 4, CPU)
    x = torch.zeros(1, 1, layout.length)
    for view in layout.views(x):
        view.normal_()
    x[0, 0, 7], x[0, 0, 9] = math.inf, math.nan
    found = layout.sums(noise.squares(layout, x)[0])[0, 0]
    for t in (1, 2):
        assert float(found[t]) == naive_squares(layout.views(x)[t].reshape(-1).numpy())
    values = layout.views(x)[0].reshape(-1).double()  # more than 4,096 blocks: three levels
    values = torch.where(values.isfinite(), values * values, 0.0)
    blocks = torch.nn.functional.pad(values, (0, -len(values) % 4096)).view(-1, 128, 32)
    assert float(found[0]) == naive_sum(noise._lane_sums(blocks).tolist())


@pytest.mark.parametrize("world", [2, 4, 5])
@pytest.mark.parametrize("shaped", [True, False])
def test_the_mean_is_the_naive_one_bit_for_bit(world: int, shaped: bool) -> None:
    layout = noise.Layout(SHAPES, world, CPU)
    x, seeds, budgets = stack(layout, 2), [7, 8], torch.tensor([0.01, 0.1], dtype=torch.float64)
    d = noise.shape_of(layout, moments(layout, 2)) if shaped else None
    found = noise.noisy_mean(layout, x, d, budgets, seeds, 3)
    for run in range(2):
        for t, name in enumerate(layout.names):
            own = [layout.views(x[run, rank])[t].reshape(-1).numpy() for rank in range(world)]
            shape = np.zeros(len(own[0]), np.int8) if d is None else layout.views(d[run])[t].reshape(-1).numpy()
            expected = naive_mean(own, shape, float(budgets[run]), seeds[run], 3, name)
            assert same_bits(layout.views(found.mean[run])[t].reshape(-1), torch.from_numpy(expected)), name
    assert not found.mean[:, ~layout.valid].any()


def test_shape_is_half_the_exponent_below_the_largest() -> None:
    layout = noise.Layout({"w": (5,), "zero": (3,), "nan": (2,)}, 4, CPU)
    v = torch.zeros(1, layout.length)
    w, _, broken = layout.views(v[0])
    w.copy_(torch.tensor([1.0, 0.25, 0.249, 1e-30, 0.0]))
    broken.copy_(torch.tensor([1.0, math.nan]))
    d = layout.views(noise.shape_of(layout, v)[0])
    assert d[0].tolist() == [0, -1, -1, -12, -12]
    assert d[1].tolist() == [0, 0, 0]
    assert d[2].tolist() == [0, 0]


def test_a_tensor_without_finite_values_becomes_nan_and_zeros_stay_zero() -> None:
    layout = noise.Layout({"inf": (200,), "zero": (200,)}, 4, CPU)
    x = torch.zeros(1, 4, layout.length)
    layout.views(x)[0].fill_(math.inf)
    mean = layout.views(noise.noisy_mean(layout, x, None, torch.tensor([0.01]).double(), [0], 0).mean[0])
    assert mean[0].isnan().all()
    assert not mean[1].any()


@pytest.mark.parametrize("world", [4, 16])
def test_share_of_pure_sampling_noise_is_the_budget(world: int) -> None:
    layout = noise.Layout({"w": (64, 4096)}, world, CPU)
    x = torch.randn(1, world, layout.length, generator=torch.Generator().manual_seed(0))
    found = noise.noisy_mean(layout, x, None, torch.tensor([0.1]).double(), [0], 0)
    share = float(found.error / found.signal)
    assert 0.08 < share < 0.105  # a little below: owners do not round their own part


@pytest.mark.gpu
def test_kernels_give_the_bits_of_torch() -> None:
    pytest.importorskip("triton")
    device, budgets = torch.device("cuda"), torch.tensor([0.01, 0.1], dtype=torch.float64)
    for world in (4, 5):
        host, there = noise.Layout(SHAPES, world, CPU), noise.Layout(SHAPES, world, device)
        x = stack(host, 2)
        for d in (None, noise.shape_of(host, moments(host, 2))):
            shape = None if d is None else d.to(device)
            expected = noise.noisy_mean(host, x, d, budgets, [1, 2], 0)
            found = noise.noisy_mean(there, x.to(device), shape, budgets.to(device), [1, 2], 0, kernels=True)
            assert same_bits(found.mean.cpu(), expected.mean)
            torch.testing.assert_close(found.error.cpu(), expected.error, rtol=1e-4, atol=0)
