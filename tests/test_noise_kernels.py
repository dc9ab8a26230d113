"""The kernels of the codec noise against the reference: emulated, and on a GPU."""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Iterator

import emulated
import pytest
import torch
from conftest import generator, same_bits
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from noisy import VALUES, part_of

from gradzip.engines import noise_layout as layout
from gradzip.engines import reference_noise as reference
from gradzip.engines.cuda import launch, noise, noise_message
from gradzip.engines.cuda.noise_message import Layout, NoiseKernels
from gradzip.engines.noise_layout import Part, Slot
from gradzip.errors import Corrupt, GradzipError, Unsupported
from gradzip.exchange import parts
from gradzip.exchange.parts import Table
from gradzip.wire import HEADER_BYTES

FEW = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
KINDS = st.lists(
    st.tuples(st.sampled_from(sorted(VALUES)), st.integers(0, 300) | st.integers(0, 9000)), min_size=1, max_size=4
)
SHARES = st.sampled_from([0.0001, 0.001, 0.01, 0.1, 0.3])


@pytest.fixture(
    params=[pytest.param("cpu", id="emulated"), pytest.param("cuda", marks=pytest.mark.gpu, id="gpu")], scope="module"
)
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Where the kernels run."""
    if request.param == "cpu" and emulated.COMPILER is None:
        pytest.skip("emulating a GPU needs g++")
    if request.param == "cpu":
        emulated.install()
    launch.load_once.cache_clear()
    yield torch.device(request.param)
    launch.emulator = None


def moved(parts: list[Part], device: torch.device, skip: int = 0) -> list[Part]:
    """The same parts on a device; with `skip`, at addresses where four values cannot be read at once."""
    out = []
    for part in parts:
        room = torch.empty(skip + part.values.numel(), dtype=part.values.dtype, device=device)
        room[skip:] = part.values
        shape = None if part.shape is None else part.shape.to(device)
        out.append(Part(room[skip:], part.level, shape, part.start, part.key, part.offset))
    return out


def compare(parts: list[Part], device: torch.device, room: int | None = None, skip: int = 0) -> torch.Tensor:
    """Encodes and decodes by both; the body that both give."""
    bound = layout.body_bound([part.values.numel() for part in parts]) if room is None else room
    bodies = torch.zeros(bound, dtype=torch.uint8), torch.zeros(bound, dtype=torch.uint8, device=device)
    there = moved(parts, device, skip)
    wide = [Part(p.values.float(), p.level, p.shape, p.start, p.key, p.offset) for p in parts]
    size, notch = reference.encode(wide, bodies[0], 7, 9)
    assert noise.encode(there, bodies[1], 7, 9) == (size, notch)
    assert torch.equal(bodies[0][:size], bodies[1][:size].cpu())
    expected = [Part(torch.full_like(part.values, 7.0), shape=part.shape) for part in wide]
    found = [Part(torch.full_like(part.values, 7.0), shape=part.shape) for part in there]
    reference.decode(bodies[0][:size], expected, divisor=3)
    noise.decode(bodies[1][:size].clone(), found, divisor=3)
    for one, other in zip(expected, found):
        assert same_bits(one.values.to(other.values.dtype), other.values.cpu())
    return bodies[0][:size]


# -- arithmetic --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(VALUES))
def test_statistics_have_the_bits_of_the_reference(device: torch.device, name: str) -> None:
    for count in (1, 33, 4096, 4097, 13000):
        x = VALUES[name](count, generator(count)).float()
        shape = torch.randint(-12, 1, (count,), generator=generator(3)).to(torch.int8)
        for given_shape in (None, shape):
            there = None if given_shape is None else given_shape.to(device)
            assert noise.statistics(x.to(device), there) == reference.statistics(x, given_shape)


def test_statistics_of_three_levels(device: torch.device) -> None:
    """More blocks than one block of sums holds."""
    count = 4096 * 4096 + 5000 if device.type == "cuda" else 4096 * 33
    x = torch.randn(count, generator=generator(1))
    assert noise.statistics(x.to(device)) == reference.statistics(x)


@FEW
@given(KINDS, SHARES, st.booleans(), st.integers(0, 1 << 30), st.integers(0, 3))
def test_bodies_have_the_bytes_of_the_reference(
    device: torch.device, kinds: list[tuple[str, int]], share: float, shaped: bool, seed: int, skip: int
) -> None:
    rng, parts = generator(seed), []
    for name, count in kinds:
        shape = torch.randint(-12, 1, (count,), generator=rng).to(torch.int8) if shaped else None
        parts.append(part_of(VALUES[name](count, rng).float(), share, shape=shape, start=seed))
    compare(parts, device, skip=skip)


@pytest.mark.parametrize("scale", [0.05, 0.3, 1, 3, 10, 40, 200, 3000, 1e5, 1e9])
def test_every_class(device: torch.device, scale: float) -> None:
    compare([Part(torch.randn(20_000, generator=generator(1)) * scale, 1.0)], device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_values_of_16_bits(device: torch.device, dtype: torch.dtype) -> None:
    for skip in (0, 1):
        x = torch.randn(10_000, generator=generator(2)).to(dtype)
        level = layout.level(reference.statistics(x.float()), 0.01, 4)
        assert noise.statistics(x.to(device)) == reference.statistics(x.float())
        compare([Part(x, level, key=5 << 40)], device, skip=skip)


def test_many_small_parts(device: torch.device) -> None:
    counts = [64, 1, 3, 32, 33, 500, 7] * 40
    parts = [part_of(torch.randn(n, generator=generator(i)) * (i % 5)) for i, n in enumerate(counts)]
    compare(parts, device, skip=1)


@pytest.mark.parametrize("room", [0.99, 0.97, 0.9, 0.5, 0.1])
def test_a_frame_that_does_not_fit_is_as_coarse_as_the_reference_makes_it(device: torch.device, room: float) -> None:
    parts = [part_of(torch.randn(20_000, generator=generator(1))), part_of(torch.randn(50, generator=generator(2)))]
    whole = compare(parts, device).numel()
    compare(parts, device, int(whole * room))


def test_a_frame_that_fits_at_no_notch_is_poisoned(device: torch.device) -> None:
    x = torch.where(torch.arange(5000) % 2 == 0, math.nan, 1.0)
    assert compare([part_of(x)], device, 2000).numel() == layout.HEAD_BYTES
    with pytest.raises(Unsupported, match="a slot of 10 bytes is too small"):
        noise.encode(moved([part_of(x)], device), torch.zeros(10, dtype=torch.uint8, device=device))


# -- damage ------------------------------------------------------------------------------------------------------------


class Guarded:
    """Memory that ends where an inaccessible page begins: who reads behind it does not come back."""

    def __init__(self) -> None:
        page = mmap.PAGESIZE
        self._map = mmap.mmap(-1, 17 * page)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + 16 * page), page, 0) == 0
        self._end = 16 * page

    def holding(self, body: torch.Tensor) -> torch.Tensor:
        room = -(-body.numel() // 4) * 4
        out = torch.frombuffer(self._map, dtype=torch.uint8, count=body.numel(), offset=self._end - room)
        out.copy_(body)
        return out


@settings(FEW, max_examples=150)
@given(st.integers(0, 1 << 30), st.sampled_from(sorted(VALUES)), st.integers(1, 9000), SHARES)
def test_a_damaged_body_is_refused_where_the_reference_refuses_it(
    device: torch.device, seed: int, name: str, count: int, share: float
) -> None:
    rng = generator(seed)
    part = part_of(VALUES[name](count, rng).float(), share)
    bound = torch.zeros(layout.body_bound([count]), dtype=torch.uint8)
    size, _ = reference.encode([part], bound, 7, 9)
    body = bound[:size].clone()
    start = layout.blocks_offset([count])
    for _ in range(int(torch.randint(1, 4, (), generator=rng))):
        lowest = start if size > start and seed % 3 else 0
        at = int(torch.randint(lowest, min(size, lowest + 60) if seed % 2 else size, (), generator=rng))
        body[at] = int(torch.randint(0, 256, (), generator=rng))
    if seed % 7 == 0:
        body = body[: int(torch.randint(1, size + 1, (), generator=rng))]
    expected, refused = Part(torch.full((count,), 7.0)), False
    try:
        reference.decode(body, [expected])
    except GradzipError:
        refused = True
    found = Part(torch.full((count,), 7.0, device=device))
    there = Guarded().holding(body) if device.type == "cpu" else body.to(device)
    if refused:
        with pytest.raises(Corrupt):
            noise.decode(there, [found])
        assert bool(found.values.isnan().any())
    else:
        noise.decode(there, [found])
        assert same_bits(expected.values, found.values.cpu())


# -- messages ----------------------------------------------------------------------------------------------------------

NAMES = ["a.weight", "a.bias", "b.weight", "c", "d.weight", "tiny"]
SIZES = [30_000, 77, 4096, 513, 9000, 3]


class Ranks:
    """All ranks of a message in one process: the collectives are copies."""

    def __init__(
        self, device: torch.device, world: int, dtype: torch.dtype, slots: tuple[int, int] | None = None
    ) -> None:
        self.world, self.table = world, Table.of(NAMES, SIZES, [world])
        self.gradients = [
            [
                (torch.randn(n, generator=generator(100 * rank + i)) * 3**i * (i != 3 or rank == 0)).to(dtype)
                for i, n in enumerate(SIZES)
            ]
            for rank in range(world)
        ]
        self.shapes = [torch.randint(-6, 1, (n,), generator=generator(i)).to(torch.int8) if i == 4 else None
                       for i, n in enumerate(SIZES)]  # fmt: skip
        counts = [[part.numel for part in self.table.of_owner(owner)] for owner in range(world)]
        bound = max(map(noise_message.slot_bound, counts))
        self.slots = slots or (bound, bound)
        columns = self.table.columns()
        self.flat = [torch.cat([torch.zeros(1, dtype=dtype), *own]).to(device) for own in self.gradients]
        self.tensors = [list(flat[1:].split(SIZES)) for flat in self.flat]  # at odd addresses
        shapes = [None if shape is None else shape.to(device) for shape in self.shapes]
        self.messages = [
            NoiseKernels(
                Layout(
                    self.tensors[rank], columns.tensor, columns.start, columns.length, columns.owner, world, rank,
                    [layout.name_key(1, name, "own", 0) for name in NAMES],
                    [layout.name_key(1, name, "sum", 0) for name in NAMES], shapes, digest=9,
                ),
                0.01, *self.slots,
            )
            for rank in range(world)
        ]  # fmt: skip

    def run(self, step: int, late: int | None = None) -> None:
        for rank, message in enumerate(self.messages):
            message.encode(step if rank != late else step - 1)
        for rank, message in enumerate(self.messages):
            for peer, other in enumerate(self.messages):
                size = self.slots[0]
                message.received[peer * size : (peer + 1) * size] = other.sent[rank * size : (rank + 1) * size]
        for message in self.messages:
            message.reduce(step)
        for message in self.messages:
            for peer, other in enumerate(self.messages):
                size = self.slots[1]
                message.gathered[peer * size : (peer + 1) * size] = other.sum_frame
        for message in self.messages:
            message.decode(step)

    def expected(self, step: int) -> list[torch.Tensor]:
        """The means by the reference; compares frames on the way."""
        world, size = self.world, self.slots[0]
        levels = [
            [layout.level(reference.statistics(x.float(), shape), 0.01, world) for x, shape in zip(own, self.shapes)]
            for own in self.gradients
        ]
        means = [torch.empty(n) for n in SIZES]
        for owner in range(world):
            parts = self.table.of_owner(owner)
            terms: list[torch.Tensor | list[Part]] = []
            for rank in range(world):
                own = [self.part(rank, part, levels[rank][part.tensor], step) for part in parts]
                if rank == owner:
                    terms.append(own)
                    continue
                slot = Slot(own, torch.zeros(size, dtype=torch.uint8))
                (written,) = reference.encode_frames([slot], step, 9)
                frame = self.messages[rank].sent[owner * size : (owner + 1) * size].cpu()
                assert torch.equal(frame[: written.size], slot.out[: written.size])
                terms.append(slot.out)
            keys = [layout.key_of(1, step, NAMES[part.tensor], "sum", 0) for part in parts]
            shapes = [self.shape(part) for part in parts]
            sums = [Part(torch.empty(p.numel), 0.0, shape, p.start, key) for p, shape, key in zip(parts, shapes, keys)]
            slot = Slot(sums, torch.zeros(self.slots[1], dtype=torch.uint8))
            written = reference.reduce(terms, slot, step, 9)
            frame = self.messages[owner].sum_frame.cpu()
            assert torch.equal(frame[: written.size], slot.out[: written.size])
            out = [Part(means[p.tensor][p.start : p.stop], shape=shape) for p, shape in zip(parts, shapes)]
            reference.decode_frame(slot.out, out, step, 9, divisor=world)
        return means

    def shape(self, part: parts.Part) -> torch.Tensor | None:
        shape = self.shapes[part.tensor]
        return None if shape is None else shape[part.start : part.stop]

    def part(self, rank: int, part: parts.Part, level: float, step: int) -> Part:
        values = self.gradients[rank][part.tensor][part.start : part.stop].float()
        key = layout.key_of(1, step, NAMES[part.tensor], "own", 0)
        return Part(values, level, self.shape(part), part.start, key, layout.offset_of(rank, self.world))


def test_a_message_with_resized_slots_has_the_frames_and_means_of_the_reference(device: torch.device) -> None:
    ranks = Ranks(device, 3, torch.float32)
    largest = ranks.slots[0]
    ranks.slots = largest - 1280, largest + 1280  # the smaller one has room yet
    assert all(message.resize(*ranks.slots) for message in ranks.messages)
    ranks.run(5)
    expected = ranks.expected(5)
    for message, tensors in zip(ranks.messages, ranks.tensors):
        assert message.sent.numel() == 3 * ranks.slots[0]
        assert message.gathered.numel() == 3 * ranks.slots[1]
        assert not message.status.any()
        for mean, found in zip(expected, tensors):
            assert same_bits(found.cpu(), mean)
    assert not ranks.messages[0].resize(2 * largest, largest), "they have outgrown the buffers"


@pytest.mark.parametrize(
    ("world", "dtype"), [(2, torch.float32), (3, torch.float32), (4, torch.bfloat16), (9, torch.float32)]
)
def test_a_message_has_the_frames_and_means_of_the_reference(
    device: torch.device, world: int, dtype: torch.dtype
) -> None:
    ranks = Ranks(device, world, dtype)
    for step in (5, 6):
        for tensors, own in zip(ranks.tensors, ranks.gradients):
            for tensor, gradient in zip(tensors, own):
                tensor.copy_(gradient)
        ranks.run(step)
        means = ranks.expected(step)
        for rank in range(world):
            assert not bool(ranks.messages[rank].status.any())
            for tensor, mean in zip(ranks.tensors[rank], means):
                assert same_bits(tensor.cpu(), mean.to(dtype))


def test_a_message_in_tight_slots_is_coarser(device: torch.device) -> None:
    counts = [[part.numel for part in Table.of(NAMES, SIZES, [2]).of_owner(owner)] for owner in range(2)]
    slots = max(noise_message.slot_for(c, 4.2) for c in counts), max(noise_message.slot_for(c, 4.4) for c in counts)
    ranks = Ranks(device, 2, torch.float32, slots)
    ranks.run(5)
    notches = [int(message.own_results.cpu().numpy().view(noise.RESULT)["notch"][0]) for message in ranks.messages]
    assert max(notches) > 0
    means = ranks.expected(5)
    for rank in range(2):
        for tensor, mean in zip(ranks.tensors[rank], means):
            assert same_bits(tensor.cpu(), mean)


def test_a_frame_of_another_step_is_told_and_becomes_nan(device: torch.device) -> None:
    ranks = Ranks(device, 3, torch.float32)
    ranks.run(5, late=1)
    for rank, message in enumerate(ranks.messages):
        status = message.status.cpu().tolist()
        assert status[:3] == [0, 2 if rank != 1 else 0, 0]
        assert status[3:] == [32, 0, 32]  # sums of the other two are poisoned
        for part in ranks.table.parts:
            values = ranks.tensors[rank][part.tensor][part.start : part.stop]
            assert bool(values.isnan().all()) == (part.owner != 1)


def test_a_damaged_block_is_told_and_its_sums_are_nan(device: torch.device) -> None:
    ranks = Ranks(device, 3, torch.float32)
    size = ranks.slots[0]
    for rank, message in enumerate(ranks.messages):
        message.encode(5)
        for peer, other in enumerate(ranks.messages[:rank]):
            other.received[rank * size : (rank + 1) * size] = message.sent[peer * size : (peer + 1) * size]
            message.received[peer * size : (peer + 1) * size] = other.sent[rank * size : (rank + 1) * size]
    owner = ranks.messages[0]
    counts = [part.numel for part in ranks.table.of_owner(0)]
    places = [sum(map(layout.padded, counts[:number])) for number in range(len(counts))]
    first = HEADER_BYTES + layout.blocks_offset(counts)
    owner.received[2 * size + first] = 254  # the class of rank 2's first block
    owner.add(5)
    assert owner.status.cpu().tolist()[:3] == [0, 0, 16]
    for place, part in zip(places, owner.sums):
        inside = max(min(layout.BLOCK - place, part.numel()), 0)
        assert bool(part[:inside].isnan().all())
        assert not bool(part[inside:].isnan().any())


def test_a_finite_message_of_one_rank_with_nan_is_nan_where_it_was(device: torch.device) -> None:
    ranks = Ranks(device, 2, torch.float32)
    ranks.gradients[1][0][123] = math.nan
    ranks.tensors[1][0][123] = math.nan
    ranks.run(5)
    means = ranks.expected(5)
    for tensor, mean in zip(ranks.tensors[0], means):
        assert same_bits(tensor.cpu(), mean)
    assert bool(ranks.tensors[0][0][123].isnan())
