"""PowerSGD, with the ranks simulated by threads that meet at every average."""

from __future__ import annotations

import pytest
import torch
from conftest import generator
from simulated import Average, together

from gradzip import Context
from gradzip.codecs.base import Reduced
from gradzip.codecs.lowrank import PowerSGD, _orthonormal
from gradzip.errors import Unsupported


class Ranks:
    """Runs a codec's reduce once per rank, each in its own thread; counts the collectives."""

    def __init__(self, codec: PowerSGD, world: int, names: list[str]) -> None:
        self.codec, self.world, self.names = codec, world, names
        self.states: list[list[dict[str, torch.Tensor]]] = [[{} for _ in names] for _ in range(world)]
        self.step = 0
        self.volumes: list[int] = []  # values in each collective

    @property
    def collectives(self) -> int:
        return len(self.volumes)

    def reduce(self, tensors: list[list[torch.Tensor]]) -> list[list[Reduced]]:
        """tensors[rank][i] -> results[rank][i]"""

        def work(rank: int, average: Average) -> list[Reduced]:
            contexts = [Context(n, self.step, rank=rank, state=s) for n, s in zip(self.names, self.states[rank])]
            return self.codec.reduce(tensors[rank], contexts, average)

        results = together(self.world, work, self.volumes.append)
        self.step += 1
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


# -- orthogonalisation -------------------------------------------------------------------------------------------------


def hostile() -> dict[str, torch.Tensor]:
    rng = generator(15)
    base, noise = torch.randn(300, 8, generator=rng), torch.randn(300, 8, generator=rng)
    return {
        "random": base,
        "zeros": torch.zeros(300, 4),
        "a column of zeros": torch.cat([base[:, :3], torch.zeros(300, 1), base[:, 3:]], 1),
        "every column twice": torch.cat([base, base], 1),
        "almost twice": torch.cat([base, base + 1e-5 * noise], 1),
        "twice but for rounding": torch.cat([base, base * (1 + 1e-7 * noise)], 1),
        "lengths from 1e-30 to 1e26": base * 10.0 ** torch.arange(-30, 34, 8),
        "subnormal": base * 1e-40,
        "powers": torch.linspace(0, 1, 300)[:, None] ** torch.arange(32)[None],
        "more columns than rows": torch.randn(5, 20, generator=rng),
        "one column": base[:, :1],
    }


@pytest.mark.parametrize("name", hostile())
def test_orthonormal_columns_span_what_they_should(name: str) -> None:
    p = hostile()[name]
    x = _orthonormal([p[None]])[0][0]
    gram = x.double().T @ x.double()
    alive = gram.diagonal() > 0.5
    assert float((gram - torch.diag(alive.double())).abs().max()) < 1e-6
    exact = p.double() / torch.linalg.vector_norm(p.double(), dim=0).clamp(min=1e-300)
    assert float((exact - x.double() @ (x.double().T @ exact)).abs().max()) < 1e-6


def test_matrices_are_orthogonalised_each_by_itself() -> None:
    """However they are put together: batches of several shapes and sizes give the same bits as one matrix alone."""
    rng = generator(16)
    batches = [torch.randn(3, 40, 4, generator=rng), torch.randn(2, 7, 4, generator=rng) * 1e9]
    together = _orthonormal(batches)
    for batch, result in zip(batches, together):
        for matrix, x in zip(batch, result):
            assert torch.allclose(_orthonormal([matrix[None]])[0][0], x, atol=1e-6)


# -- half steps --------------------------------------------------------------------------------------------------------


def test_half_steps_take_one_collective_and_half_the_values() -> None:
    rng = generator(17)
    shapes = [(20, 30), (30,), (8, 3, 5, 5), (20, 30), ()]
    ranks = Ranks(PowerSGD(rank=2, alternate=True), 2, [f"p{i}" for i in range(len(shapes))])
    for step in range(4):
        ranks.reduce([[torch.randn(s, generator=rng) for s in shapes] for _ in range(2)])
        assert ranks.collectives == step + 1
    left, right = (2 * (20 + 8 + 20) + 31, 2 * (30 + 75 + 30) + 31)
    assert ranks.volumes == [left, right, left, right]
    assert sum(ranks.codec.sent(s) for s in shapes) == (left + right) / 2


def test_half_steps_find_the_subspace() -> None:
    rng = generator(18)
    tensors = [[torch.randn(40, 60, generator=rng)] for _ in range(2)]
    ranks = Ranks(PowerSGD(rank=2, alternate=True), 2, ["w"])
    mean = (tensors[0][0] + tensors[1][0]) / 2
    for _ in range(60):
        results = ranks.reduce(tensors)
        assert torch.equal(results[0][0].mean, results[1][0].mean)
        residuals = torch.stack([r[0].residual for r in results if r[0].residual is not None])
        assert close(results[0][0].mean + residuals.mean(0), mean, 1e-6)
    best = float(torch.linalg.svdvals(mean)[2:].norm())
    assert float((results[0][0].mean - mean).norm()) < 1.03 * best


def test_half_steps_are_exact_with_enough_rank_from_the_second_on() -> None:
    tensors = [[low_rank((20, 30), 2, seed)] for seed in (1, 2)]
    ranks = Ranks(PowerSGD(rank=4, alternate=True), 2, ["w"])
    ranks.reduce(tensors)
    for _ in range(3):
        assert close(ranks.reduce(tensors)[0][0].mean, (tensors[0][0] + tensors[1][0]) / 2)


def test_rank_and_kind_of_step_may_change_at_any_time() -> None:
    x = low_rank((40, 60), 3, 19)
    ranks = Ranks(PowerSGD(rank=3), 1, ["w"])
    for codec in (
        *(PowerSGD(rank=3), PowerSGD(rank=3, alternate=True), PowerSGD(rank=1, alternate=True)),
        *(PowerSGD(rank=4, alternate=True), PowerSGD(rank=3)),
    ):
        ranks.codec = codec
        result = ranks.reduce([[x]])[0][0]
        assert result.residual is not None
        assert close(result.mean + result.residual, x)
    assert close(result.mean, x)


@pytest.mark.parametrize("alternate", [False, True])
def test_zeros_and_failed_steps_with_half_steps_too(alternate: bool) -> None:
    ranks = Ranks(PowerSGD(rank=2, alternate=alternate), 2, ["w"])
    zero, x = torch.zeros(20, 30), low_rank((20, 30), 1, 7)
    for _ in range(3):
        assert torch.equal(ranks.reduce([[zero], [zero]])[0][0].mean, zero)
    for _ in range(3):
        result = ranks.reduce([[x], [x]])
    assert close(result[0][0].mean, x)
    bad = x.clone()
    bad[3, 3] = torch.nan
    for (spoiled,) in ranks.reduce([[x], [bad]]):
        assert not bool(spoiled.mean.isfinite().all())


# -- types, feedback, volumes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_types(dtype: torch.dtype) -> None:
    x = low_rank((20, 30), 1, 20).to(dtype)
    result = Ranks(PowerSGD(rank=4), 1, ["w"]).reduce([[x]])[0][0]
    assert result.mean.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert result.residual is not None
    assert close(result.mean + result.residual, x.to(result.mean.dtype), 1e-6)
    mixed = Ranks(PowerSGD(rank=1), 1, ["a", "b", "c"]).reduce([[x, x.float(), x[0]]])[0]
    assert [r.mean.shape for r in mixed] == [(20, 30), (20, 30), (30,)]


def test_without_feedback_there_is_no_residual() -> None:
    x = torch.randn(20, 30, generator=generator(21))
    assert Ranks(PowerSGD(rank=1, feedback=False), 1, ["w"]).reduce([[x]])[0][0].residual is None


def resnet18() -> list[tuple[int, ...]]:
    """ResNet-18 for CIFAR-10: convolutions, batch norms (weight and bias) and a linear layer."""
    shapes: list[tuple[int, ...]] = [(64, 3, 3, 3), (64,), (64,)]
    before = 64
    for width in (64, 128, 256, 512):
        for block in range(2):
            shapes += [(width, before, 3, 3), (width,), (width,), (width, width, 3, 3), (width,), (width,)]
            if block == 0 and width != before:
                shapes += [(width, before, 1, 1), (width,), (width,)]
            before = width
    return [*shapes, (10, 512), (10,)]


def lstm() -> list[tuple[int, ...]]:
    """Three layers of 650 units on WikiText-2's 28,869 words; the decoder shares the embedding."""
    layer: list[tuple[int, ...]] = [(2600, 650), (2600, 650), (2600,), (2600,)]
    return [(28869, 650), *(3 * layer), (28869,)]


def test_volumes_are_those_of_the_paper() -> None:
    """Tables 3 and 4 of Vogels et al.: MiB per epoch (24 and 70 steps of 16 workers), and the ratios."""
    values = {model: sum(torch.Size(s).numel() for s in model()) for model in (resnet18, lstm)}
    assert values == {resnet18: 11_173_962, lstm: 28_949_319}
    mebibytes = {model: 4 * steps / 2**20 for model, steps in ((resnet18, 24), (lstm, 70))}
    assert round(values[resnet18] * mebibytes[resnet18], 1) == 1023.0
    assert round(values[lstm] * mebibytes[lstm]) == 7730
    sent = {r: sum(map(PowerSGD(rank=r).sent, resnet18())) for r in (1, 2, 4, 7)}
    assert [round(v * mebibytes[resnet18], 2) for v in sent.values()] == [4.21, 7.53, 14.18, 24.16]
    assert [round(values[resnet18] / sent[r]) for r in (1, 2, 4)] == [243, 136, 72]
    assert [sum(map(PowerSGD(rank=r).sent, lstm())) for r in (1, 2, 4)] == [93_488, 142_507, 240_545]
    assert [round(values[lstm] / sum(map(PowerSGD(rank=r).sent, lstm()))) for r in (1, 2, 4)] == [310, 203, 120]


def test_the_volume_said_is_the_volume_sent() -> None:
    shapes = resnet18()
    ranks = Ranks(PowerSGD(rank=4), 1, [f"p{i}" for i in range(len(shapes))])
    ranks.reduce([[torch.ones(s) for s in shapes]])
    assert sum(ranks.volumes) == sum(map(ranks.codec.sent, shapes))
    assert ranks.collectives == 3


@pytest.mark.gpu
@pytest.mark.parametrize("alternate", [False, True])
def test_on_a_gpu(alternate: bool) -> None:
    """Replicas are identical there too, and nothing goes wrong with zeros and dependent columns."""
    rng = generator(22)
    shapes = [(64, 96), (64, 96), (33, 40), (10,)]
    ranks = Ranks(PowerSGD(rank=4, alternate=alternate), 2, [f"p{i}" for i in range(len(shapes))])
    tensors = [[torch.randn(s, generator=rng).cuda() for s in shapes] for _ in range(2)]
    for rank in tensors:
        rank[1] = low_rank((64, 96), 2, 23).cuda()
        rank[2].zero_()
    for _ in range(4):
        results = ranks.reduce(tensors)
        assert all(torch.equal(a.mean, b.mean) for a, b in zip(*results))
        assert all(bool(r.mean.isfinite().all()) for r in results[0])
    assert close(results[0][1].mean, tensors[0][1])
    assert not bool(results[0][2].mean.any())
    for name, p in hostile().items():
        x = _orthonormal([p[None].cuda()])[0][0].double()
        gram = x.T @ x
        alive = (gram.diagonal() > 0.5).double()
        assert float((gram - torch.diag(alive)).abs().max()) < 1e-6, name
