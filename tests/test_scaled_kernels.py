"""Engines of block-scaled codes against the reference: every instruction set, emulated kernels, and on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import emulated
import pytest
import torch
from conftest import ZOO, generator, gradient, random_bits, same_bits
from engine_cases import isas, native_on
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gradzip.engines import native_scaled, scaled_layout
from gradzip.engines import reference_scaled as reference
from gradzip.engines.cuda import launch
from gradzip.engines.cuda import scaled as kernels
from gradzip.engines.scaled_layout import BLOCKS, FP8, INT4, INT8, Form, Parts

FORMS = [Form(kind, block) for kind in (INT8, INT4, FP8) for block in BLOCKS]
FORMS += [Form(kind, block, True) for kind in (INT8, INT4) for block in BLOCKS]
FEW = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
Code = Callable[..., None]


@pytest.fixture(
    params=[
        *isas(),
        pytest.param("cpu", id="emulated"),
        pytest.param("cuda", marks=pytest.mark.gpu, id="gpu"),
    ],
    scope="module",
)
def engine(request: pytest.FixtureRequest) -> Iterator[tuple[Code, torch.device]]:
    """What codes, and where."""
    if request.param not in ("cpu", "cuda"):
        with native_on(request.param):
            yield native_scaled.code, torch.device("cpu")
        return
    if request.param == "cpu" and emulated.COMPILER is None:
        pytest.skip("emulating a GPU needs g++")
    if request.param == "cpu":
        emulated.install()
    launch.load_once.cache_clear()
    yield kernels.code, torch.device(request.param)
    launch.emulator = None


class Case:
    """Parts of one frame, with the values of each rank."""

    def __init__(self, form: Form, values: list[list[torch.Tensor]], device: torch.device, seed: int = 0) -> None:
        self.form, self.device, self.world = form, device, len(values)
        self.values = [[x.to(device) for x in of_rank] for of_rank in values]
        self.counts = [x.numel() for x in values[0]]
        rng = generator(seed)
        self.keys = torch.randint(0, 1 << 62, (3, len(self.counts)), generator=rng).tolist()
        self.starts = [128 * i for i in range(len(self.counts))]

    def parts(self, values: list[torch.Tensor], outs: list[torch.Tensor], key: int, offset: int = 0) -> Parts:
        return Parts(self.form, values, outs, self.starts).fill(self.keys[key], self.keys[2], offset)

    def exchanged(self, code: Code) -> list[torch.Tensor]:
        """Frames of all ranks but the last one, the frame of the sum with its own values, and the means."""
        size = scaled_layout.places(self.counts, self.form).size
        frames = [torch.full((size,), 0xA5, dtype=torch.uint8, device=self.device) for _ in range(self.world)]
        for rank, values in enumerate(self.values[:-1]):
            code(self.parts(values, values, 0, 12345 * rank), [], out=frames[rank])
        outs = [torch.full_like(x, 7.0) for x in self.values[0]]
        own = self.values[-1]
        code(self.parts(own, own, 1), [*frames[:-1], None], out=frames[-1])
        code(self.parts([], outs, 1), [frames[-1]], self.world)
        return [*frames, *outs]


def compare(
    engine: tuple[Code, torch.device], form: Form, values: list[list[torch.Tensor]], seed: int = 0
) -> list[torch.Tensor]:
    code, device = engine
    expected = Case(form, values, torch.device("cpu"), seed).exchanged(reference.code)
    found = Case(form, values, device, seed).exchanged(code)
    for one, other in zip(expected, found):
        assert torch.equal(one, other.cpu()) if one.dtype == torch.uint8 else same_bits(one, other.cpu())
    return expected


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_frames_and_means_have_the_bits_of_the_reference(engine: tuple[Code, torch.device], form: Form) -> None:
    counts = (1000, 1, 31, 32, 33, 256, 257, 0, 128)
    values = [[gradient(n, seed=10 * rank + i) for i, n in enumerate(counts)] for rank in range(3)]
    compare(engine, form, values)


@pytest.mark.parametrize("form", [Form(INT8, 32), Form(INT4, 128, True), Form(FP8, 64)], ids=str)
@pytest.mark.parametrize("name", sorted(name for name, x in ZOO.items() if 0 < x.numel() < 10_000))
def test_awkward_values(engine: tuple[Code, torch.device], form: Form, name: str) -> None:
    x = ZOO[name].reshape(-1).contiguous()
    compare(engine, form, [[x], [gradient(x.numel())], [-x]])


@FEW
@given(st.sampled_from(FORMS), st.lists(st.integers(0, 700), min_size=1, max_size=4), st.integers(0, 1 << 30))
def test_any_bits(engine: tuple[Code, torch.device], form: Form, counts: list[int], seed: int) -> None:
    compare(engine, form, [[random_bits(n, seed + 7 * rank) for n in counts] for rank in range(2)], seed)


@pytest.mark.parametrize("form", [Form(INT8, 128), Form(INT4, 32, True), Form(FP8, 256)], ids=str)
def test_any_frame_decodes_to_the_same_numbers(engine: tuple[Code, torch.device], form: Form) -> None:
    """Damaged codes and scales do no harm, and mean the same to all engines."""
    code, device = engine
    size = scaled_layout.places([1000], form).size
    frame = torch.randint(0, 256, (size,), generator=generator(3), dtype=torch.uint8)
    found = [torch.empty(1000), torch.empty(1000, device=device)]
    reference.code(Parts(form, [], [found[0]]).fill(0, 99), [frame])
    code(Parts(form, [], [found[1]]).fill(0, 99), [frame.to(device)])
    assert same_bits(found[0], found[1].cpu())
