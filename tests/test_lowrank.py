"""PowerSGD, with the ranks simulated by threads that meet at every average."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from conftest import generator

from gradzip import Context
from gradzip.codecs.base import Reduced
from gradzip.codecs.lowrank import PowerSGD
from gradzip.errors import Unsupported


class Ranks:
    """Runs a codec's reduce once per rank, each in its own thread; counts the collectives."""

    def __init__(self, codec: PowerSGD, world: int, names: list[str]) -> None:
        self.codec, self.world, self.names = codec, world, names
        self.states: list[list[dict[str, torch.Tensor]]] = [[{} for _ in names] for _ in range(world)]
        self.step = self.collectives = 0

    def reduce(self, tensors: list[list[torch.Tensor]]) -> list[list[Reduced]]:
        """tensors[rank][i] -> results[rank][i]"""
        slots: list[torch.Tensor | None] = [None] * self.world
        results: list[list[Reduced]] = [[] for _ in range(self.world)]
        meeting = threading.Barrier(self.world, timeout=20)

        def average_for(rank: int) -> Callable[[torch.Tensor], None]:
            def average(x: torch.Tensor) -> None:
                slots[rank] = x.clone()
                meeting.wait()
                mean = torch.stack([s for s in slots if s is not None]).mean(0)
                self.collectives += rank == 0
                meeting.wait()
                x.copy_(mean)

            return average

        def run(rank: int) -> None:
            contexts = [Context(n, self.step, rank=rank, state=s) for n, s in zip(self.names, self.states[rank])]
            try:
                results[rank] = self.codec.reduce(tensors[rank], contexts, average_for(rank))
            except BaseException:
                meeting.abort()
                raise

        threads = [threading.Thread(target=run, args=(r,)) for r in range(self.world)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        self.step += 1
        assert all(len(r) == len(self.names) for r in results), "a rank failed"
        return results


def low_rank(shape: tuple[int, ...], rank: int, seed: int) -> torch.Tensor:
    rng = generator(seed)
    columns = torch.Size(shape[1:]).numel()
    return (torch.randn(shape[0], rank, generator=rng) @ torch.randn(rank, columns, generator=rng)).view(shape)


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-5) -> bool:
    return float((a - b).norm()) <= tolerance * float(b.norm())


@pytest.mark.parametrize("shape", [(20, 30), (16, 3, 5, 5)])
def test_enough_rank_reproduces_the_mean(shape: tuple[int, ...]) -> None:
    """Two ranks that each hold a matrix of rank 2: their mean has rank 4 at the most."""
    tensors = [[low_rank(shape, 2, seed)] for seed in (1, 2)]
    mean = (tensors[0][0] + tensors[1][0]) / 2
    for result in Ranks(PowerSGD(rank=4), 2, ["w"]).reduce(tensors):
        assert result[0].mean.shape == shape
        assert close(result[0].mean, mean)


def test_more_rank_than_needed_does_no_harm() -> None:
    x = low_rank((20, 30), 1, 3)
    result = Ranks(PowerSGD(rank=5), 1, ["w"]).reduce([[x]])[0][0]
    assert close(result.mean, x)


def test_equal_shapes_do_not_disturb_each_other() -> None:
    """Rank-1 matrices of one shape but very different size are each exact."""
    names = ["a", "b", "c", "d"]
    tensors = [low_rank((12, 17), 1, seed) * 10.0 ** (3 * seed - 6) for seed in range(4)]
    for x, result in zip(tensors, Ranks(PowerSGD(rank=1), 1, names).reduce([tensors])[0]):
        assert close(result.mean, x)


def test_means_and_residuals_add_up_to_the_inputs() -> None:
    """What got through and what each rank kept is what there was, on average over ranks."""
    rng = generator(5)
    tensors = [[torch.randn(20, 30, generator=rng), torch.randn(7, generator=rng)] for _ in range(3)]
    results = Ranks(PowerSGD(rank=2), 3, ["w", "b"]).reduce(tensors)
    mean = torch.stack([t[0] for t in tensors]).mean(0)
    residuals = torch.stack([r[0].residual for r in results if r[0].residual is not None])
    assert residuals.shape == (3, 20, 30)
    assert close(results[0][0].mean + residuals.mean(0), mean, 1e-6)
    assert float(residuals.norm()) < float(torch.stack([t[0] for t in tensors]).norm())
    assert all(r[1].residual is None for r in results)
    assert close(results[0][1].mean, torch.stack([t[1] for t in tensors]).mean(0))


def test_the_residual_is_local() -> None:
    """A rank whose own matrix lies in the common subspace has lost nothing, whatever other ranks hold."""
    x = low_rank((20, 30), 1, 6)
    results = Ranks(PowerSGD(rank=1), 2, ["w"]).reduce([[x], [3 * x]])
    for rank, scale in enumerate((1, 3)):
        residual = results[rank][0].residual
        assert residual is not None
        assert float(residual.norm()) < 1e-5 * scale * float(x.norm())


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_a_layer_of_zeros_gives_zeros_and_recovers(rank: int) -> None:
    ranks = Ranks(PowerSGD(rank=rank), 2, ["w"])
    zero, x = torch.zeros(20, 30), low_rank((20, 30), 1, 7)
    x[0] = 0  # as the padding row of an embedding
    for _ in range(3):
        for result in ranks.reduce([[zero], [zero]]):
            assert torch.equal(result[0].mean, zero)
            assert result[0].residual is not None
            assert torch.equal(result[0].residual, zero)
    for _ in range(2):
        result = ranks.reduce([[x], [x]])[0]
    assert close(result[0].mean, x)


def test_replicas_are_identical_and_the_warm_start_improves() -> None:
    rng = generator(8)
    tensors = [[torch.randn(40, 60, generator=rng)] for _ in range(2)]
    ranks = Ranks(PowerSGD(rank=2), 2, ["w"])
    mean = (tensors[0][0] + tensors[1][0]) / 2
    errors = []
    for _ in range(20):
        results = ranks.reduce(tensors)
        assert torch.equal(results[0][0].mean, results[1][0].mean)
        assert torch.equal(ranks.states[0][0]["q"], ranks.states[1][0]["q"])
        errors.append(float((results[0][0].mean - mean).norm()))
    _, sigma, _ = torch.linalg.svd(mean)
    best = float(sigma[2:].norm())
    assert errors[-1] < 1.02 * best
    assert errors[-1] < errors[0]


def test_the_warm_start_survives_a_change_of_rank() -> None:
    tensors = [[low_rank((40, 60), 3, 9)]]
    ranks = Ranks(PowerSGD(rank=3), 1, ["w"])
    ranks.reduce(tensors)
    first = ranks.states[0][0]["q"]
    ranks.codec = PowerSGD(rank=1)
    ranks.reduce(tensors)
    assert ranks.states[0][0]["q"].shape == (60, 1)
    ranks.codec = PowerSGD(rank=3)
    assert close(ranks.reduce(tensors)[0][0].mean, tensors[0][0])
    assert ranks.states[0][0]["q"].shape == first.shape


def test_three_collectives_whatever_the_number_of_tensors() -> None:
    rng = generator(10)
    shapes = [(20, 30), (30,), (8, 3, 5, 5), (5,), (40, 20), (2, 3), ()]
    names = [f"p{i}" for i in range(len(shapes))]
    ranks = Ranks(PowerSGD(rank=1), 2, names)
    ranks.reduce([[torch.randn(s, generator=rng) for s in shapes] for _ in range(2)])
    assert ranks.collectives == 3


def test_small_matrices_stay_whole() -> None:
    codec = PowerSGD(rank=2)
    assert not codec.factored((3, 4))
    assert not codec.factored((100,))
    assert not codec.factored(())
    assert codec.factored((20, 30))
    x = torch.randn(3, 4, generator=generator(11))
    result = Ranks(codec, 1, ["w"]).reduce([[x]])[0][0]
    assert torch.equal(result.mean, x)
    assert result.residual is None


@pytest.mark.parametrize("scale", [1e-30, 1e-15, 1e15])
def test_tiny_and_huge_gradients(scale: float) -> None:
    x = low_rank((20, 30), 1, 12) * scale
    ranks = Ranks(PowerSGD(rank=1), 1, ["w"])
    for _ in range(3):
        assert close(ranks.reduce([[x]])[0][0].mean / scale, x / scale)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_shows_on_all_ranks(value: float) -> None:
    tensors = [[torch.randn(20, 30, generator=generator(s))] for s in (13, 14)]
    tensors[1][0][4, 5] = value
    for result in Ranks(PowerSGD(rank=2), 2, ["w"]).reduce(tensors):
        assert not bool(result[0].mean.isfinite().all())


def test_it_has_no_frame() -> None:
    with pytest.raises(Unsupported, match="rounds"):
        PowerSGD().encode(torch.zeros(3))
    with pytest.raises(Unsupported, match="rank"):
        PowerSGD(rank=0)
