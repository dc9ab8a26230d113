"""PowerSGD's kernels against torch's operations: emulated, and on a GPU."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence

import emulated
import pytest
import torch
from conftest import generator
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_lowrank import close, hostile, low_rank

from gradzip import Context
from gradzip.codecs.base import Apart, Kept, Left, Reduced
from gradzip.codecs.lowrank import PowerSGD
from gradzip.engines.cuda import factors, launch, pack_select

SHAPES = [(130, 64), (300, 90), (7,), (130, 64), (520, 70), (64, 300), (17, 3, 5, 5), (2, 2), ()]
Lost = list[torch.Tensor | None]


@pytest.fixture(
    params=[pytest.param("cpu", id="emulated"), pytest.param("cuda", marks=pytest.mark.gpu, id="gpu")], scope="module"
)
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Where the kernels run; `serves` is set for the emulator by `emulates`."""
    wanted = torch.device(request.param)
    if wanted.type == "cpu" and emulated.COMPILER is None:
        pytest.skip("emulating a GPU needs g++")
    if wanted.type == "cpu":
        emulated.install()
    factors.plan.cache_clear()
    yield wanted
    launch.emulator = None


@pytest.fixture(autouse=True)
def emulates(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.type == "cpu":
        monkeypatch.setattr(pack_select, "serves", lambda tensor: tensor.is_contiguous())


class Twin:
    """The same steps by torch's operations and by kernels. What other ranks add is known: they halve every average."""

    def __init__(self, codec: PowerSGD, shapes: Sequence[tuple[int, ...]], device: torch.device) -> None:
        self.codec, self.device, self.step, self.skipped = codec, device, 0, 0
        self.states: list[dict[str, torch.Tensor]] = [{} for _ in shapes]
        self.lost: Lost = [None] * len(shapes)
        self.guests = set[int]()  # those that go as they are, whatever their shape
        self.volumes: list[list[int]] = [[], []]

    def contexts(self, states: list[dict[str, torch.Tensor]]) -> list[Context]:
        whole = [i in self.guests for i in range(len(states))]
        return [Context(f"p{i}", self.step, whole=w, state=state) for i, (w, state) in enumerate(zip(whole, states))]

    def halve(self, way: int, flat: torch.Tensor) -> None:
        self.volumes[way].append(flat.numel())
        flat.mul_(0.5)

    def bucket(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """One after the other, as in DDP's buckets: few begin where four values can be read at once."""
        flat = torch.cat([torch.zeros(self.skipped), *(g.reshape(-1) for g in gradients)]).to(self.device)
        parts = flat[self.skipped :].split([g.numel() for g in gradients])
        return [part.view(g.shape) for part, g in zip(parts, gradients)]

    def run(self, gradients: list[torch.Tensor], scale: float = 1.0) -> tuple[list[Reduced], list[torch.Tensor], Left]:
        """Both start from the same state; it goes on with what kernels made."""
        gradients = self.bucket(gradients)
        inputs = [g.clone() if lost is None else g + lost * scale for g, lost in zip(gradients, self.lost)]
        by_torch = [dict(s) for s in self.states]
        expected = self.codec.reduce(inputs, self.contexts(by_torch), lambda flat: self.halve(0, flat))
        left = self.by_kernels(gradients, self.contexts(self.states), scale)
        for mine, other in zip(left.kept.states, by_torch):
            assert mine.keys() == other.keys()
            for key, value in mine.items():
                assert value.shape == other[key].shape
                assert value.is_contiguous()
        self.states, self.lost, self.step = left.kept.states, left.kept.residuals, self.step + 1
        return expected, gradients, left

    def by_kernels(self, gradients: list[torch.Tensor], contexts: list[Context], scale: float) -> Left:
        fused = self.codec.in_place(gradients, contexts)
        assert fused is not None
        told = list[int]()
        before = Apart(self.lost, [ctx.state for ctx in contexts])
        left = fused.reduce(before, scale, lambda flat: self.halve(1, flat), lambda: told.append(1))
        assert told == [1]
        return left

    def compare(self, gradients: list[torch.Tensor], scale: float = 1.0) -> None:
        expected, means, left = self.run(gradients, scale)
        for (mean, residual), found, lost in zip(expected, means, left.kept.residuals):
            size = float(mean.norm()) + (0 if residual is None else float(residual.norm()))
            assert float((found - mean).norm()) <= 2e-5 * size + 1e-30
            assert (lost is None) == (residual is None)
            if lost is not None and residual is not None:
                assert lost.shape == residual.shape
                assert float((lost * scale - residual).norm()) <= 2e-5 * size + 1e-30
        assert left.finite
        assert sorted(self.volumes[0]) == sorted(self.volumes[1])


def random(shapes: Sequence[tuple[int, ...]], seed: int) -> list[torch.Tensor]:
    rng = generator(seed)
    return [torch.randn(shape, generator=rng) for shape in shapes]


@pytest.mark.parametrize("rank", [1, 3, 4, 6, 16, 32])
def test_kernels_give_what_torch_gives(device: torch.device, rank: int) -> None:
    twin = Twin(PowerSGD(rank=rank), SHAPES, device)
    for step in range(3):
        twin.compare(random(SHAPES, step), scale=2.0**step)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(1, 300)), max_size=4),
    st.sampled_from([1, 2, 4]),
    st.integers(0, 3),
    st.sampled_from([1e-20, 1e-3, 1.0, 1e15]),
)
def test_any_shapes_at_any_address(
    device: torch.device, shapes: list[tuple[int, int]], rank: int, skipped: int, size: float
) -> None:
    all_shapes = [*shapes, (40, 33)]  # one at least goes as factors
    twin = Twin(PowerSGD(rank=rank), all_shapes, device)
    twin.skipped = skipped
    for step in range(2):
        twin.compare([size * x for x in random(all_shapes, step)])


def test_zeros_and_low_ranks(device: torch.device) -> None:
    """What the rank suffices for gets through as it is; zeros stay zeros, and leave no NaN behind."""
    given = [low_rank((64, 96), 2, 23), torch.zeros(64, 96), low_rank((40, 33), 4, 3) * 1e-12]
    twin = Twin(PowerSGD(rank=4), [(64, 96), (64, 96), (40, 33)], device)
    for _ in range(3):
        twin.lost = [None] * 3
        _, means, left = twin.run(given)
        assert left.finite
        assert all(close(mean, x.to(device) / 2) for x, mean in zip(given, means) if x.any())
        assert not bool(means[1].any())


@pytest.mark.parametrize("name", [name for name, p in hostile().items() if p.shape[0] > p.shape[1]])
def test_columns_are_orthonormal_and_span_what_they_should(device: torch.device, name: str) -> None:
    """The average of the left factors is replaced by columns p; then the mean is a projection of M to what p spans."""
    p = hostile()[name]
    rows, rank = p.shape
    normal = p.double() / torch.linalg.vector_norm(p.double(), dim=0).clamp(min=1e-300)
    columns = rank + rows + 3 * rank
    m = torch.cat([normal.float(), torch.eye(rows), torch.randn(rows, 3 * rank, generator=generator(3))], 1)
    calls = list[int]()

    def average(flat: torch.Tensor) -> None:
        calls.append(flat.numel())
        if len(calls) == 1:
            flat.copy_(p.view(-1))

    codec = PowerSGD(rank=rank)
    found = m.to(device, copy=True)
    fused = codec.in_place([found], [Context("w")])
    assert fused is not None
    assert fused.reduce(Apart([None], [{}]), 1.0, average, lambda: None).finite
    assert calls == [p.numel(), columns * rank]
    found = found.cpu()
    assert float((found[:, :rank] - m[:, :rank]).abs().max()) < 2e-6, "p itself is projected to p"
    projection = found[:, rank : rank + rows].double()
    assert float((projection @ projection - projection).abs().max()) < 1e-6, "and nothing in part"
    again = codec.reduce([m], [Context("w")], _replaced_by(p))[0].mean
    if name not in ("almost twice", "twice but for rounding", "powers"):  # where noise decides what else is spanned
        assert close(found, again, 1e-5)


def _replaced_by(p: torch.Tensor) -> Callable[[torch.Tensor], None]:
    left = [p]
    return lambda flat: flat.copy_(left.pop().view(-1)) if left else None  # type: ignore[return-value]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_shows(device: torch.device, value: float) -> None:
    for place in range(3):
        given = random([(64, 96), (40, 33), (5,)], 1)
        given[place].view(-1)[3] = value
        _, means, left = Twin(PowerSGD(rank=2), [(64, 96), (40, 33), (5,)], device).run(given)
        assert not left.finite
        assert not bool(means[place].isfinite().all())
        assert all(bool(mean.isfinite().all()) for i, mean in enumerate(means) if i != place)


def test_means_that_overflow_show(device: torch.device) -> None:
    """Of factors that are finite."""
    left, right = torch.tensor([[1.0, 1.0], [1.0, -1.0], [0.0, 0.0]]), torch.full((50, 2), 3e38)
    averages = [right, left]
    x = torch.randn(3, 50, generator=generator(2)).to(device)
    fused = PowerSGD(rank=2).in_place([x], [Context("w")])
    assert fused is not None

    def average(flat: torch.Tensor) -> None:
        flat.copy_(averages.pop().view(-1))

    assert not fused.reduce(Apart([None], [{}]), 1.0, average, lambda: None).finite
    assert x[0].isinf().all()
    assert x[1:].isfinite().all()


def test_without_feedback_what_was_lost_before_still_counts(device: torch.device) -> None:
    twin = Twin(PowerSGD(rank=2, feedback=False), [(64, 96), (6,)], device)
    twin.lost = [t.to(device) for t in random([(64, 96), (6,)], 9)]
    twin.compare(random([(64, 96), (6,)], 8), scale=4.0)
    assert twin.lost == [None, None]


def test_the_rank_may_change(device: torch.device) -> None:
    twin = Twin(PowerSGD(rank=2), [(64, 96), (40, 33)], device)
    for step, rank in enumerate((2, 5, 1, 5)):
        twin.codec = PowerSGD(rank=rank)
        twin.compare(random([(64, 96), (40, 33)], step))
        assert twin.states[0]["q"].shape == (96, rank)


def test_the_same_again_is_the_same_to_the_bit(device: torch.device) -> None:
    """Wherever it lies: all ranks must get the same."""
    found = []
    for _ in range(2):
        _, means, left = Twin(PowerSGD(rank=4), SHAPES, device).run(random(SHAPES, 3))
        found.append([*means, *(r for r in left.kept.residuals if r is not None)])
    assert all(torch.equal(a, b) for a, b in zip(*found))


def test_what_kernels_do_not_take(device: torch.device) -> None:
    x, one = torch.randn(64, 96, device=device), [Context()]
    assert PowerSGD(rank=32).in_place([x], one) is not None
    assert PowerSGD(rank=33).in_place([x], one) is None
    assert PowerSGD(alternate=True).in_place([x], one) is None
    assert PowerSGD().in_place([x.double()], one) is None
    assert PowerSGD().in_place([x.T], one) is None
    assert PowerSGD().in_place([x[0]], one) is None, "there is no matrix"
    assert PowerSGD().in_place([x], [Context(whole=True)]) is None, "it is not to be coded"
    assert PowerSGD().in_place([x, x[0, ::2], x.T], [*one, *one, Context(whole=True)]) is not None, (
        "others go as they are"
    )


def test_one_for_many_steps(device: torch.device) -> None:
    """It goes on from what it left as one, and from the same taken apart, as after a step that was dropped."""
    given = random(SHAPES, 3)
    twin = Twin(PowerSGD(rank=4), SHAPES, device)
    gradients = twin.bucket(given)
    fused = twin.codec.in_place(gradients, twin.contexts(twin.states))
    assert fused is not None
    kept: Kept = Apart(twin.lost, twin.states)
    for step in range(5):
        for to, x in zip(gradients, given):
            to.copy_(x)
        if step == 2:
            kept = Apart([None if x is None else x.clone() for x in kept.residuals], kept.states)
        _, means, _ = twin.run(given)
        left = fused.reduce(kept, 1.0, lambda f: twin.halve(1, f), lambda: None)
        assert left.finite
        assert all(torch.equal(a, b) for a, b in zip(gradients, means))
        assert [state.keys() for state in left.kept.states] == [state.keys() for state in twin.states]
        kept = left.kept


def test_what_is_left_holds_no_gradients(device: torch.device) -> None:
    """DDP may give up its buckets before the next step."""
    gradients = [x.to(device) for x in random(SHAPES, 3)]
    fused = PowerSGD(rank=4).in_place(gradients, [Context(str(i)) for i in range(len(SHAPES))])
    assert fused is not None
    kept = fused.reduce(Apart([None] * len(SHAPES), [{}] * len(SHAPES)), 1.0, lambda flat: None, lambda: None).kept
    refs = [weakref.ref(g) for g in gradients]
    del fused, gradients
    assert [ref() for ref in refs] == [None] * len(SHAPES)
    assert len(kept.residuals) == len(SHAPES)


@pytest.mark.parametrize("alternate", [False, True])
def test_guests_go_as_they_are(device: torch.device, alternate: bool) -> None:
    """Matrices that factors would make smaller, too; they have no state."""

    def halve(flat: torch.Tensor) -> None:
        flat.mul_(0.5)

    given = random([(64, 96), (32, 16), (16, 3, 3, 3)], 6)
    twin = Twin(PowerSGD(rank=2, alternate=alternate), [(64, 96), (32, 16), (16, 3, 3, 3)], device)
    twin.guests = {1, 2}
    for _ in range(2):
        if alternate:
            contexts = twin.contexts(twin.states)
            reduced = twin.codec.reduce([x.to(device) for x in given], contexts, halve)
            means = [mean for mean, _ in reduced]
        else:
            _, means, left = twin.run(given)
            assert left.kept.residuals[1:] == [None, None]
        assert torch.equal(means[1].cpu(), given[1] / 2)
        assert torch.equal(means[2].cpu(), given[2] / 2)
        assert not torch.equal(means[0].cpu(), given[0] / 2)
        assert twin.states[1:] == [{}, {}]


def test_half_steps_leave_no_trace(device: torch.device) -> None:
    twin = Twin(PowerSGD(rank=2), [(64, 96)], device)
    x = random([(64, 96)], 4)
    PowerSGD(rank=2, alternate=True).reduce([t.to(device) for t in x], twin.contexts(twin.states), lambda flat: None)
    assert "half" in twin.states[0]
    twin.compare(x)
    assert twin.states[0].keys() == {"q"}
