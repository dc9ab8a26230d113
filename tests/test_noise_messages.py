"""The codec noise by whole messages: the arithmetic of docs/format.md, whatever message a tensor travels in."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import generator, gradient, same_bits
from ranks import run_ranks
from test_on_host import Exchange, connect
from test_programs import compiled

from gradzip.codecs.noise import Noise
from gradzip.engines import noise_layout, reference_noise
from gradzip.engines.noise_layout import Measured, Part, Shapes, Statistics
from gradzip.exchange.coding import Message
from gradzip.exchange.interpreter import Interpreter
from gradzip.exchange.on_host.noise import NoiseOnHost
from gradzip.exchange.parts import Table
from gradzip.exchange.topology import Topology
from gradzip.routes import NAMED

ALLTOALL = NAMED["alltoall"]
SIZES = [3, 3000, 0, 1, 700, 9001]
STEP, SEED = 5, 0


def shapes_of(sizes: list[int]) -> list[torch.Tensor | None]:
    """For every other tensor."""
    drawn = [torch.randint(-12, 1, (n,), generator=generator(n), dtype=torch.int8) for n in sizes]
    return [shape if i % 2 else None for i, shape in enumerate(drawn)]


def by_hand(
    name: str, tensors: list[torch.Tensor], shape: torch.Tensor | None, share: float
) -> tuple[torch.Tensor, list[float], float]:
    """The mean of one tensor as all ranks get it, and the levels: each formula of docs/format.md once, in order."""
    world, numel = len(tensors), tensors[0].numel()
    wide = [x.float() for x in tensors]
    levels = [noise_layout.level(reference_noise.statistics(x, shape), share, world) for x in wide]
    sent = []
    for rank, (x, level) in enumerate(zip(wide, levels)):
        key = noise_layout.key_of(SEED, STEP, name, "own", 0)
        q = reference_noise.rounded(Part(x, level, shape, 0, key, noise_layout.offset_of(rank, world)), 0)
        sent.append(reference_noise.values_of(q, level, shape))
    total = np.full(numel, np.nan, np.float32)
    for part in Table.of([name], [numel], [world]).parts:
        at = slice(part.start, part.stop)
        terms = [wide[rank].numpy()[at] if rank == part.owner else sent[rank][at] for rank in range(world)]
        total[at] = terms[0]
        for term in terms[1:]:
            total[at] = total[at] + term
    level = noise_layout.level_of_sum(levels)
    key = noise_layout.key_of(SEED, STEP, name, "sum", 0)
    q = reference_noise.rounded(Part(torch.from_numpy(total), level, shape, 0, key), 0)
    mean = torch.from_numpy(reference_noise.values_of(q, level, shape)) / world
    return mean.to(tensors[0].dtype), levels, level


def interpret(
    gradients: list[list[torch.Tensor]], shapes: list[torch.Tensor | None], share: float = 0.01
) -> list[list[torch.Tensor]]:
    world, sizes, dtype = len(gradients), [x.numel() for x in gradients[0]], gradients[0][0].dtype
    codec = NoiseOnHost(Noise(share))
    topology = Topology(0, tuple((rank,) for rank in range(world)))
    program = compiled(ALLTOALL, sizes, codec, topology, dtype=dtype)
    messages = [Message(program.names, dtype, rank, world, STEP, SEED, Shapes(shapes)) for rank in range(world)]
    return Interpreter(program, codec, messages).run(gradients)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_means_are_those_of_the_formulas(world: int, dtype: torch.dtype) -> None:
    shapes = shapes_of(SIZES)
    gradients = [[gradient(n, 10 * r + i, dtype) for i, n in enumerate(SIZES)] for r in range(world)]
    for result in interpret(gradients, shapes):
        for number, (mean, tensors) in enumerate(zip(result, zip(*gradients))):
            assert same_bits(mean, by_hand(f"t{number}", list(tensors), shapes[number], 0.01)[0])


def test_tensors_that_are_zero_or_not_finite_arrive_as_such() -> None:
    x = gradient(2000)
    odd = {"zero": torch.zeros(2000), "nan": x.clone(), "inf": x.clone(), "subnormal": x * 1e-40, "huge": x * 1e38}
    odd["nan"][7], odd["inf"][9] = math.nan, math.inf
    ranks = [list(odd.values()), [x] * len(odd)]
    for result in interpret(ranks, [None] * len(odd)):
        found = dict(zip(odd, result))
        assert math.isnan(found["nan"][7])
        assert math.isinf(found["inf"][9])
        for name in ("nan", "inf"):
            assert found[name].isfinite().sum() == 1999, "other values are as they were"
        for name in ("zero", "subnormal"):
            assert (found[name] - x / 2).norm() < 0.15 * (x / 2).norm()
        assert (found["huge"] - odd["huge"] / 2).norm(dtype=torch.float64) < 0.15 * odd["huge"].norm(
            dtype=torch.float64
        )
    for result in interpret([[torch.zeros(2000)]] * 2, [None]):
        assert same_bits(result[0], torch.zeros(2000))


def test_levels_of_many_tensors_are_those_of_each() -> None:
    squares = [0.0, 0.0, 1e-300, 1e-80, 3.7, 1e70, math.inf, *np.exp(10 * np.random.default_rng(0).normal(size=200))]
    weights = [(1 + 31 * i) << 20 for i in range(len(squares))]
    finite = [i != 1 for i in range(len(squares))]
    measured = Measured(np.array(squares), np.array(weights), np.array(finite))
    for share, world in ((0.01, 4), (0.3, 2), (0.0001, 7)):
        found = noise_layout.levels(measured, share, world)
        each = [noise_layout.level(Statistics(*one), share, world) for one in zip(squares, weights, finite)]
        assert same_bits(torch.from_numpy(found), torch.tensor(each))


def test_noise_has_mean_zero_and_the_share_that_was_asked_for() -> None:
    """Where ranks' gradients have nothing in common, the share is that of the budget; it is the same in all draws."""
    world, share, count = 4, 0.03, 200
    gradients = [[torch.randn(1000, generator=generator(rank))] for rank in range(world)]
    exact = torch.stack([x for (x,) in gradients]).double().mean(0)
    total, squares = torch.zeros(1000, dtype=torch.float64), 0.0
    for draw in range(count):
        codec = NoiseOnHost(Noise(share))
        topology = Topology(0, tuple((rank,) for rank in range(world)))
        program = compiled(ALLTOALL, [1000], codec, topology)
        messages = [Message(program.names, torch.float32, rank, world, draw) for rank in range(world)]
        noise = Interpreter(program, codec, messages).run(gradients)[0][0].double() - exact
        total += noise
        squares += float(noise.square().sum())
    seen = squares / count / float(exact.square().sum())
    assert 0.7 * share < seen < share
    error = math.sqrt(squares / count / 1000 / count)  # of the mean of all draws, for one value
    assert float((total / count).square().mean().sqrt()) < 1.1 * error, "no value is off by more than chance"


# --- On the host runner ----------------------------------------------------------------------------------------------


def compare(rank: int, dtype: torch.dtype) -> dict[str, object]:
    exchange, world = Exchange(connect(1)), dist.get_world_size()
    exchange.step = STEP
    shapes, codec = shapes_of(SIZES), NoiseOnHost(Noise(0.01))
    names = [f"t{i}" for i in range(len(SIZES))]
    gradients = [[gradient(n, 10 * r + i, dtype) for i, n in enumerate(SIZES)] for r in range(world)]
    expected, same, outcomes = interpret(gradients, shapes)[rank], [], []
    for cuts in ([0, 6], [0, 1, 4, 6]):
        tensors, messages = [x.clone() for x in gradients[rank]], []
        for first, last in itertools.pairwise(cuts):
            prepared = exchange.prepared(codec, ALLTOALL, names[first:last], SIZES[first:last], dtype=dtype)
            messages.append((prepared, tensors[first:last]))
        exchange.step = STEP
        outcomes.append(exchange.run(messages, [shapes[first:last] for first, last in itertools.pairwise(cuts)]))
        same.append(all(same_bits(a, b) for a, b in zip(tensors, expected)))
    return {"same": same, "outcomes": outcomes, "means": expected, "gradients": gradients}


@pytest.mark.parametrize("world", [2, 3, 4])
def test_runner_gives_the_bits_of_the_interpreter_in_any_message(world: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for rank in run_ranks(world, compare, dtype):
            assert rank["same"] == [True, True]
            for outcome in rank["outcomes"]:
                assert outcome.values == sum(SIZES)
                squares = sum(float(mean.double().square().sum()) for mean in rank["means"])
                assert outcome.squares == pytest.approx(squares, rel=1e-6)
                assert outcome.allowed == pytest.approx(0.01 * squares, rel=1e-6)
                assert outcome.coarser == 0
            expected = expected_noise(rank["gradients"], shapes_of(SIZES))
            assert rank["outcomes"][0].noise == pytest.approx(expected, rel=1e-6)


def expected_noise(gradients: list[list[torch.Tensor]], shapes: list[torch.Tensor | None]) -> float:
    """Variances of both roundings, each by its formula: that of W stratified draws, and that of one."""
    world, total = len(gradients), 0.0
    for number, tensors in enumerate(zip(*gradients)):
        _, levels, level = by_hand(f"t{number}", list(tensors), shapes[number], 0.01)
        shape = shapes[number]
        weights = float(torch.pow(4.0, shape.double()).sum()) if shape is not None else tensors[0].numel()
        own = (world + 1) / 12 * sum(x * x for x in levels) / world
        total += weights * (own + level * level / 6) / world**2
    return total
