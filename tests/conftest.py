"""What all tests share: a zoo of awkward tensors, the engines that run here, and the two markers."""

from __future__ import annotations

from collections.abc import Iterator

import emulated
import pytest
import torch
from hypothesis import HealthCheck, settings

from gradzip import Floor, emulate, engines
from gradzip.engines.cuda import launch
from gradzip.errors import EngineError

# Around the lane count (32), the block (4096) and the segment (131072) of the wire format.
SIZES = (0, 1, 31, 32, 33, 4095, 4096, 4097, 131072 + 5)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_SPECIAL = (
    *(0x00000000, 0x80000000),  # +0, -0
    *(0x00000001, 0x80000001, 0x007FFFFF, 0x807FFFFF),  # subnormals
    *(0x00800000, 0x80800000),  # smallest normal
    *(0x7F7FFFFF, 0xFF7FFFFF),  # largest finite
    *(0x7F800000, 0xFF800000),  # infinities
    *(0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF, 0x7FABCDEF),  # NaNs, quiet and signalling, with payloads
    *(0x3F800000, 0xBF800000, 0x3FFFFFFF, 0x3F800001),  # 1, -1, and their neighbourhood
)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gradient(numel: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values like those of a gradient: small, of a scale that drifts from row to row, some exactly zero."""
    rng = generator(seed)
    x = torch.randn(numel, generator=rng) * 1e-3
    x *= torch.exp2(torch.randint(-8, 4, (numel // 64 + 1,), generator=rng)).repeat_interleave(64)[:numel]
    x[torch.rand(numel, generator=rng) < 0.05] = 0
    return x.to(dtype)


def special(numel: int = 4099) -> torch.Tensor:
    """Every kind of float32, over and over."""
    bits = torch.tensor([b - (1 << 32) if b >= 1 << 31 else b for b in _SPECIAL], dtype=torch.int32)
    return bits.repeat(numel // bits.numel() + 1)[:numel].view(torch.float32)


def random_bits(numel: int, seed: int = 0) -> torch.Tensor:
    """Uniformly random bit patterns: incompressible, and full of NaNs and subnormals."""
    bits = torch.randint(-(1 << 31), 1 << 31, (numel,), generator=generator(seed), dtype=torch.int64)
    return bits.to(torch.int32).view(torch.float32)


def zoo() -> dict[str, torch.Tensor]:
    """Awkward float32 tensors by name; `.to(dtype)` gives those of other types."""
    tensors = {f"gradient-{n}": gradient(n, seed=n) for n in SIZES}
    tensors |= {
        "scalar": torch.tensor(-1.5e-3),
        "zeros": torch.zeros(5000),
        "minus-zeros": -torch.zeros(5000),
        "constant": torch.full((5000,), -3.25),
        "one-exponent": 1 + torch.rand(5000, generator=generator(1)),
        "mostly-zero": torch.where(torch.arange(10000) % 97 == 5, gradient(10000, seed=2), 0.0),
        "trailing-zero-bits": gradient(5000, seed=3).bfloat16().float(),
        "special": special(),
        "special-among-gradients": torch.cat([gradient(3000, seed=4), special(63), gradient(3000, seed=5)]),
        "random-bits": random_bits(9000),
        "subnormal": torch.arange(-2500, 2500, dtype=torch.int32).abs().view(torch.float32),
        "huge": gradient(5000, seed=6) * 2.0**120,
        "transposed": gradient(70 * 61, seed=7).view(70, 61).t(),
        "strided": gradient(9000, seed=8)[::2],
        "expanded": torch.tensor([0.25, -0.5]).expand(40, 2),
    }
    return tensors


ZOO = zoo()


def floor_for(x: torch.Tensor, seed: int = 0, depth: int = 12) -> Floor:
    """A Floor like AdamW's that keeps about `depth` mantissa bits of the typical value of `gradient`."""
    rng = generator(seed)
    theta = torch.randn(x.numel(), generator=rng) * 0.05
    second = (torch.randn(x.numel(), generator=rng) * 1e-4).square()
    return Floor(theta, second, c0=-184 - depth, c1=0, c2=60)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal to the last bit: NaN equals itself, and -0 is not +0."""
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    kind = kinds[a.element_size()]
    flat_a, flat_b = (t.detach().reshape(-1).contiguous().view(kind) for t in (a, b))
    return a.dtype == b.dtype and torch.equal(flat_a, flat_b)


def available_engines() -> list[str]:
    """The engines that run here at full speed."""
    names = []
    for name in engines.NAMES:
        try:
            engines.load(name)
        except EngineError:
            continue
        names.append(name)
    return names


@pytest.fixture(params=available_engines())
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs a test once on every available engine; inside, that engine is forced."""
    with engines.use(request.param):
        yield request.param


@pytest.fixture(scope="module", params=["small", "large"])
def gpu(request: pytest.FixtureRequest) -> Iterator[emulated.Emulator]:
    """The cuda engine, on CPU tensors: its kernels for small messages, and those for large ones."""
    if emulated.COMPILER is None:
        pytest.skip("emulating a GPU needs g++")
    usual = launch.SMALL_BLOCKS, launch.SMALL_DECODED_BLOCKS
    if request.param == "large":
        launch.SMALL_BLOCKS = launch.SMALL_DECODED_BLOCKS = 0
    yield emulated.install()
    launch.emulator = None
    launch.SMALL_BLOCKS, launch.SMALL_DECODED_BLOCKS = usual


@pytest.fixture(scope="session")
def namespaces() -> None:
    """For tests that emulate hosts: skipped, with the reason, where that is impossible."""
    reason = emulate.obstacle()
    if reason is not None:
        pytest.skip(reason)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if item.get_closest_marker("slow") and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="run with --slow"))


torch.set_num_threads(1)  # the tests are many and small
# How long an example takes says something of the machine, and of what else runs there.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")
