"""Generates tensors and coding jobs of every kind, and proves that all engines write and read the same bytes.

    python tests/engine_cases.py 10000 [seed]     proves it on that many tensors and says so

tests/test_engines.py draws the same recipes with hypothesis, which shrinks what fails.
"""

from __future__ import annotations

import math
import random
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import ModuleType

import numpy as np
import torch
from conftest import random_bits, same_bits, special

from gradzip import Context, engines, wire
from gradzip.codecs import books
from gradzip.codecs.gcomp import GComp
from gradzip.engines import reference
from gradzip.engines.layout import BLOCK, Floor, Job, body_bound, segments_of
from gradzip.engines.reference_values import floor_values, map_values
from gradzip.errors import CodecError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MODES = ("lossless", "keep", "near", "paper")
FLOORS = ("int8", "theta", "theta and second", "mixed", "coarse")
KINDS = (
    "gradient",  # a few exponents
    "wide",  # many exponents: escapes
    "zeros",
    "minus zeros",
    "rare",  # one value in a hundred is not zero
    "half",  # every other one
    "one exponent",
    "constant",
    "cut",  # trailing zero bits, as bfloat16 autocast leaves them
    "special",  # NaN, infinities, subnormals and the ends of the range
    "few special",
    "bits",  # incompressible
    "tiny",
    "huge",
)


@dataclass(frozen=True)
class Recipe:
    """Everything that a tensor and its coding follow from."""

    blocks: tuple[str, ...] = ()  # the kinds of the whole blocks
    tail: int = 1  # values of a last, shorter block
    last: str = "gradient"  # and their kind
    dtype: str = "float32"
    mode: str = "lossless"
    keep: int = 7
    truncate: bool = False
    limit: int = 8
    floor: str = "int8"
    depth: int = 8  # mantissa bits that the floors leave of a typical value
    shift: int = 0
    code: str = "sampled"  # sampled, given or shared: where the code lengths come from
    seed: int = 0


@dataclass(frozen=True)
class Case:
    x: torch.Tensor
    job: Job
    floor: torch.Tensor | Floor | None
    lengths: torch.Tensor | None  # given to the encoder
    book: torch.Tensor | None  # given to the decoder


def make(recipe: Recipe) -> Case:
    rng = torch.Generator().manual_seed(recipe.seed)
    numel = BLOCK * len(recipe.blocks) + recipe.tail
    scale = 2.0 ** int(torch.randint(-30, 10, (), generator=rng))
    parts = [block(kind, BLOCK, scale, rng) for kind in recipe.blocks] + [block(recipe.last, recipe.tail, scale, rng)]
    x = torch.cat(parts)
    x = x if recipe.dtype == "float32" else in_16_bits(x, DTYPES[recipe.dtype])
    lengths = None if recipe.code == "sampled" else random_lengths(segments_of(numel), recipe.seed)
    book = recipe.seed % 1000 + 1000 if recipe.code == "shared" else 0
    if book:
        lengths = random_lengths(1, recipe.seed).expand(segments_of(numel), 256).contiguous()
    job = Job(recipe.mode, recipe.keep, recipe.truncate, recipe.limit, recipe.shift, book)
    floor = None
    if recipe.mode in ("near", "paper"):
        typical = math.frexp(scale)[1] - 1
        floor = make_floor(recipe, typical, numel, rng)
    return Case(x, job, floor, lengths, lengths if book else None)


def block(kind: str, numel: int, scale: float, rng: torch.Generator) -> torch.Tensor:
    seed = int(torch.randint(1 << 30, (), generator=rng))
    normal, pick = torch.randn(numel, generator=rng) * scale, torch.rand(numel, generator=rng)
    values = {
        "gradient": lambda: torch.where(pick < 0.05, 0.0, normal),
        "wide": lambda: normal * torch.exp2(torch.randint(-40, 20, (numel,), generator=rng)),
        "zeros": lambda: torch.zeros(numel),
        "minus zeros": lambda: torch.where(pick < 0.5, 0.0, -0.0),
        "rare": lambda: torch.where(pick < 0.99, 0.0, normal),
        "half": lambda: torch.where(pick < 0.5, 0.0, normal),
        "one exponent": lambda: normal.sign() * scale * (1 + pick),
        "constant": lambda: torch.full((numel,), -1.5 * scale),
        "cut": lambda: normal.bfloat16().float(),
        "special": lambda: special(numel),
        "few special": lambda: torch.where(pick < 0.01, special(numel), normal),
        "bits": lambda: random_bits(numel, seed),
        "tiny": lambda: normal / scale * 2.0**-125,
        "huge": lambda: normal / scale * 2.0**126,
    }
    assert set(values) == set(KINDS)
    return values[kind]()


def in_16_bits(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The upper half of each float32: for bfloat16 its value, for float16 another one, but of all kinds as well."""
    return (x.view(torch.int32) >> 16).to(torch.int16).view(dtype)


def make_floor(recipe: Recipe, typical: int, numel: int, rng: torch.Generator) -> torch.Tensor | Floor:
    """Floors `depth` below the typical exponent; in paper mode reaches that much above it."""
    grid = typical + recipe.depth if recipe.mode == "paper" else typical - recipe.depth
    if recipe.floor.startswith("theta"):
        theta = block("few special", numel, 1.0, rng)  # exponent fields around 127
        second = block("few special", numel, 2.0**-20, rng).abs() if recipe.floor != "theta" else None
        c0 = grid - 127 if second is None else grid - 127 - 53
        return Floor(theta, second, c0, c1=recipe.seed % 7 - 3, c2=recipe.seed % 110)
    if recipe.floor == "coarse":
        grid = 127 - recipe.seed % 30
    spread = torch.randint(-4, 5, (numel,), generator=rng) + grid
    if recipe.floor == "mixed":
        spread[torch.rand(numel, generator=rng) < 0.2] = -128
    return spread.clamp(-128, 127).to(torch.int8)


def random_lengths(segments: int, seed: int) -> torch.Tensor:
    """Code lengths of complete codes, (segments, 256), of all sizes: leaves of a tree are split at random."""
    rng = random.Random(seed)
    lengths = torch.zeros(segments, 256, dtype=torch.uint8)
    for row in lengths:
        leaves = [0]
        for _ in range(rng.choice((0, 1, 5, 20, 300))):
            at = rng.randrange(len(leaves))
            if leaves[at] < 8:
                leaves[at] += 1
                leaves.append(leaves[at])
        rng.shuffle(leaves)
        near_base = [s % 256 for s in range(-12, 13)]
        others = [s for s in range(256) if s not in near_base]
        rng.shuffle(near_base)
        for symbol, length in zip(near_base + others, leaves[1:]):  # the first leaf is the escape's
            row[symbol] = length
    return lengths


# -- the proof ---------------------------------------------------------------------------------------------------------


def encode(engine: ModuleType, case: Case) -> torch.Tensor:
    out = torch.empty(body_bound(case.x.numel(), case.x.dtype), dtype=torch.uint8)
    return out[: engine.encode(case.x, case.job, out, case.floor, case.lengths)]


def decode(engine: ModuleType, body: torch.Tensor, case: Case, add_to: torch.Tensor | None = None) -> torch.Tensor:
    out = torch.empty_like(case.x) if add_to is None else add_to.clone()
    engine.decode(body, out, case.floor, case.job.shift, add_to is not None, case.book)
    return out


@contextmanager
def native_on(isa: str) -> Iterator[ModuleType]:
    """The native engine with that instruction set."""
    native = engines.load("native")
    before = native.isa()
    native.set_isa(isa)
    try:
        yield native
        assert (native.NAME, native.isa()) == ("native", isa), "another engine ran than this proof is about"
    finally:
        native.set_isa(before)


def isas() -> list[str]:
    return engines.load("native").available_isas()


def check_identity(case: Case) -> torch.Tensor:
    """Asserts that all engines agree on one case; returns the body."""
    body = encode(reference, case)
    values = decode(reference, body, case)
    assert same_bits(values, mapped(case)), "what is decoded is not what the mode maps the values to"
    there = torch.randn(case.x.numel(), generator=torch.Generator().manual_seed(1)).to(case.x.dtype)
    there[::5] = -0.0
    there[1::7] = with_payloads(there[1::7])
    sums = canonical(there + values)
    assert same_bits(decode(reference, body, case, there), sums), "the reference adds up to other values"
    hop = hop_of(case, body, values)
    for isa in isas():
        with native_on(isa) as native:
            assert torch.equal(native.histogram(case.x, case.job, case.floor), histogram(case)), isa
            assert torch.equal(encode(native, case), body), f"{isa} writes other bytes"
            assert same_bits(decode(native, body, case), values), f"{isa} reads other values"
            assert same_bits(decode(native, body, case, there), sums), f"{isa} adds up to other values"
            if hop is not None:
                assert torch.equal(native_hop(native, case, body), hop), f"{isa}: a hop differs from its parts"
    return body


def mapped(case: Case) -> torch.Tensor:
    """What a mode maps the values to, without coding them."""
    if case.x.dtype != torch.float32:
        return case.x
    bits = case.x.view(torch.int32).numpy().view(np.uint32)
    result = map_values(bits, case.job, floor_values(case.floor, case.job))
    return torch.from_numpy(result.view(np.int32).copy()).view(torch.float32)


def histogram(case: Case) -> torch.Tensor:
    return reference.histogram(case.x, case.job, case.floor)


def canonical(sums: torch.Tensor) -> torch.Tensor:
    """The sums with the one NaN that docs/format.md allows in them."""
    return torch.where(sums.isnan(), torch.nan, sums)


def with_payloads(x: torch.Tensor) -> torch.Tensor:
    """NaNs of both signs, quiet and signalling, each with a payload of its own; and infinities of both signs."""
    kind, bits = (torch.int32, 32) if x.element_size() == 4 else (torch.int16, 16)
    infinity = int(torch.tensor(torch.inf, dtype=x.dtype).view(kind))
    number = torch.arange(x.numel(), dtype=torch.int64)
    pattern = infinity | number * 0x9E37 % (1 << (3 if bits == 16 else 20)) | (number % 3 == 0) << (bits - 1)
    return pattern.to(kind).view(x.dtype)


def local_of(case: Case) -> torch.Tensor:
    """What the rank in the middle of a hop holds."""
    scale = case.x.abs().nan_to_num(0, 0, 0).amax().clamp(1e-30, 1e30) if case.x.numel() else torch.tensor(1.0)
    local = torch.randn(case.x.numel(), generator=torch.Generator().manual_seed(2)) * scale
    local[3::11] = with_payloads(local[3::11])
    return local


def hop_of(case: Case, body: torch.Tensor, values: torch.Tensor) -> torch.Tensor | None:
    """Decode, add, encode; the code is that of the incoming body unless lengths are given."""
    if case.x.dtype != torch.float32:
        return None
    lengths = case.lengths
    if lengths is None:
        tables = reference.read_head(body.numpy(), case.x.numel())[3]
        lengths = torch.from_numpy(np.array(tables, np.uint8).reshape(-1, 256))
    job = replace(case.job, shift=case.job.shift + 1)
    return encode(reference, replace(case, x=canonical(local_of(case) + values), job=job, lengths=lengths))


def native_hop(native: ModuleType, case: Case, body: torch.Tensor) -> torch.Tensor:
    out = torch.empty(body_bound(case.x.numel(), torch.float32), dtype=torch.uint8)
    job = replace(case.job, shift=case.job.shift + 1)
    size = native.decode_add_encode(body, local_of(case), job, out, case.floor, case.job.shift, case.lengths, case.book)
    return out[:size]


# -- damaged bodies ----------------------------------------------------------------------------------------------------


def damage(body: torch.Tensor, rng: random.Random) -> torch.Tensor:
    data = bytearray(body.numpy().tobytes())
    for _ in range(rng.choice((1, 1, 2, 4))):
        where = rng.randrange(max(len(data), 1))
        kind = rng.randrange(8)
        if kind == 0:
            del data[where:]
        elif kind == 1:
            data += rng.randbytes(rng.choice((1, 4, 30)))
        elif kind == 2:
            data[where : where + 4] = b""
        elif data:
            data[where] ^= 1 << rng.randrange(8)
    return torch.frombuffer(data, dtype=torch.uint8).clone() if data else torch.empty(0, dtype=torch.uint8)


def check_damaged(case: Case, body: torch.Tensor) -> bool:
    """Asserts that all engines give the same values of a damaged body, or all refuse it with the same class of error.
    True if they read it."""
    values = _read("reference", body, case)
    for isa in isas():
        with native_on(isa):
            other = _read("native", body, case)
            if isinstance(values, torch.Tensor) and isinstance(other, torch.Tensor):
                assert same_bits(other, values), f"{isa} reads other values"
            else:
                assert other is values, f"{isa} gives {other}, the reference {values}"
    return isinstance(values, torch.Tensor)


def _read(engine: str, body: torch.Tensor, case: Case) -> torch.Tensor | type[CodecError]:
    """What the codec decodes, or the class of its refusal. It checks what the engines take for granted."""
    frame = torch.cat([torch.zeros(wire.HEADER_BYTES, dtype=torch.uint8), body])
    wire.write_header(frame, GComp.wire_id, case.x.dtype, case.x.numel(), body.numel(), check=False)
    if case.book is not None and case.x.numel():
        books.install(books.Book(case.job.book, case.book[0]))
    with engines.use(engine):
        try:
            return GComp().decode(frame, Context(floor=case.floor, shift=case.job.shift))
        except CodecError as error:
            return type(error)


# -- the runner --------------------------------------------------------------------------------------------------------


def random_recipe(rng: random.Random) -> Recipe:
    sizes = (0, 1, 5, 31, 32, 33, 64, 100, 511, 512, 513, 1000, 2047, 2048, 4000, 4095)
    return Recipe(
        blocks=tuple(rng.choice(KINDS) for _ in range(rng.choice((0, 0, 0, 0, 0, 0, 0, 1, 1, 2, 4)))),
        tail=rng.choice(sizes),
        last=rng.choice(KINDS),
        dtype=rng.choice(("float32", "float32", "float32", "bfloat16", "float16")),
        mode=rng.choice((*MODES, "near")),
        keep=rng.randrange(24),
        truncate=rng.random() < 0.4,
        limit=rng.choice((8, 8, 8, *range(1, 9))),
        floor=rng.choice(FLOORS),
        depth=rng.randrange(-3, 30),
        shift=rng.choice((0, 0, 0, 1, 3, 20)),
        code=rng.choice(("sampled", "sampled", "given", "shared")),
        seed=rng.randrange(1 << 30),
    )


def prove(count: int, seed: int) -> str:
    """Checks that many random recipes, and one damaged body of each; a line that says what was done."""
    rng = random.Random(seed)
    read, kinds, values = 0, Counter[str](), 0
    for _ in range(count):
        recipe = random_recipe(rng)
        try:
            case = make(recipe)
            body = check_identity(case)
            read += check_damaged(case, damage(body, rng))
        except BaseException:
            print(recipe, file=sys.stderr)
            raise
        values += case.x.numel()
        kinds[f"{recipe.mode}" if recipe.dtype == "float32" else recipe.dtype] += 1
    split = ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items()))
    return (
        f"{count} tensors ({values} values: {split}): reference, {', '.join(isas())} write the same bytes, and read, "
        f"add and re-encode the same values; of as many damaged bodies all read the same {read} and refuse the others"
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(prove(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000, int(sys.argv[2]) if len(sys.argv) > 2 else 1))
