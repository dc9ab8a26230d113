"""The GPU engine: its kernels on an emulated GPU (tests/emulator), and on a real one where there is one."""

from __future__ import annotations

import emulated
import pytest
import torch
from conftest import gradient, random_bits, same_bits, special
from emulated import floors
from engine_cases import with_payloads
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gradzip import engines
from gradzip.codecs import Context, parse
from gradzip.engines import huffman, reference
from gradzip.engines.cuda import launch
from gradzip.engines.layout import BODY_HEAD_BYTES, TABLE_BYTES, Floor, Job, body_bound, segments_of
from gradzip.errors import CodecError, EngineError, GradzipError, Truncated, Unsupported

MODES = ["gcomp:mode=lossless", "gcomp:keep=7", "gcomp:keep=12", "gcomp", "gcomp:mode=paper"]


def encoded(engine: str, codec: str, x: torch.Tensor, context: Context) -> torch.Tensor:
    with engines.use(engine):
        return parse(codec).encode(x, context)


def check(codec: str, x: torch.Tensor, context: Context) -> None:
    """Both engines write the same frame; the emulated GPU reads it, and adds it to something."""
    frame = encoded("reference", codec, x, context)
    assert torch.equal(encoded("cuda", codec, x, context), frame)
    with engines.use("reference"):
        expected = parse(codec).decode(frame, context)
    with engines.use("cuda"):
        assert same_bits(parse(codec).decode(frame, context), expected)
        total = torch.ones_like(expected)
        parse(codec).decode(frame, context, out=total, add=True)
    finite = expected.isfinite()
    assert same_bits(total[finite], (torch.ones_like(expected) + expected)[finite])


@pytest.mark.parametrize("codec", MODES)
@pytest.mark.parametrize("numel", [1, 33, 4096, 12_301])
def test_bytes_are_those_of_the_reference(gpu: emulated.Emulator, codec: str, numel: int) -> None:
    x = gradient(numel, seed=numel)
    x[:40] = special(40)[:numel]
    check(codec, x, Context(floor=floors(numel, "given")))
    kernels = "small_" if launch.SMALL_BLOCKS else "encode_"
    assert any(name.startswith(kernels) for name in gpu.launched), "the emulated GPU did the work"


@pytest.mark.parametrize("kind", ["theta", "both"])
@pytest.mark.parametrize("shift", [0, 2])
def test_floors_are_made_from_the_optimizers_state(gpu: emulated.Emulator, kind: str, shift: int) -> None:
    numel = 8_500
    check("gcomp", gradient(numel), Context(floor=floors(numel, kind), shift=shift))


@pytest.mark.parametrize("numbers", [(-150, -75, -4), (-150, -91, -20), (-60, 0, 60), (-300, 40, -300), (20, -200, 9)])
def test_floors_of_any_bits(gpu: emulated.Emulator, numbers: tuple[int, int, int]) -> None:
    """Parameters and moments that are 0, subnormal, negative, infinite or NaN; floors out of range on both sides."""
    numel = 700  # four rows at a time, and a few that are left
    x, theta, second = (random_bits(numel, seed=seed) for seed in range(3))
    x[::2], theta[::3], second[::3] = gradient(350), torch.randn(234) * 0.05, torch.rand(234) * 1e-8
    theta[:40], second[20:60] = special(40), special(40)
    for shift in (0, 3):
        check("gcomp", x, Context(floor=Floor(theta, second, *numbers), shift=shift))
        check("gcomp", x, Context(floor=Floor(theta, None, numbers[0]), shift=shift))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits(gpu: emulated.Emulator, dtype: torch.dtype) -> None:
    check("gcomp:mode=lossless", special(5_001).to(dtype), Context())
    check("gcomp:mode=lossless", (gradient(9_000) + 1e-3).to(dtype), Context())


@pytest.mark.parametrize("coarse", [(-14, -8), (-10, -4)])
def test_sparse_blocks(gpu: emulated.Emulator, coarse: tuple[int, int]) -> None:
    numel = 9_000
    given = torch.randint(*coarse, (numel,), generator=torch.Generator().manual_seed(1)).to(torch.int8)
    check("gcomp", gradient(numel), Context(floor=given))


@pytest.mark.parametrize(
    "x",
    [torch.zeros(5000), torch.full((5000,), -3.25), random_bits(5000), gradient(9000).bfloat16().float()],
    ids=["zeros", "constant", "random", "from-bf16"],
)
def test_odd_blocks(gpu: emulated.Emulator, x: torch.Tensor) -> None:
    check("gcomp:mode=lossless", x, Context())
    check("gcomp", x, Context(floor=floors(x.numel(), "given")))
    check("gcomp", x, Context(floor=torch.full((x.numel(),), -128, dtype=torch.int8)))


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 5000), st.sampled_from(MODES), st.integers(0, 100), st.integers(1, 8))
def test_any_size_and_limit(gpu: emulated.Emulator, numel: int, codec: str, seed: int, limit: int) -> None:
    check(f"{codec},limit={limit}" if ":" in codec else f"{codec}:limit={limit}", gradient(numel, seed), Context(
        floor=floors(numel, "given")
    ))  # fmt: skip


def test_many_segments(gpu: emulated.Emulator) -> None:
    """Three tables, and blocks whose places are summed up over more than 32 others."""
    x = gradient(2 * 131_072 + 5)
    with engines.use("native"):
        frame = parse("gcomp:mode=lossless").encode(x, Context())
    assert torch.equal(encoded("cuda", "gcomp:mode=lossless", x, Context()), frame)
    with engines.use("cuda"):
        assert same_bits(parse("gcomp:mode=lossless").decode(frame, Context()), x)


def test_views_that_are_not_aligned(gpu: emulated.Emulator) -> None:
    x = gradient(9_003)[3:]
    check("gcomp:mode=lossless", x, Context())
    room = torch.empty(body_bound(x.numel(), x.dtype) + 3, dtype=torch.uint8)
    engine = engines.load("cuda")
    size = engine.encode(x, Job("lossless"), room[3:])
    assert torch.equal(room[3 : 3 + size], encoded("reference", "gcomp:mode=lossless", x, Context())[24:])
    back = torch.empty(9_001)[1:]
    engine.decode(room[3 : 3 + size], back)
    assert same_bits(back, x)


def test_many_tensors_in_one_launch(gpu: emulated.Emulator) -> None:
    engine = engines.load("cuda")
    parts = [gradient(n, seed=n) for n in (5000, 0, 1, 9000, 4096)]
    outs = [torch.empty(body_bound(p.numel(), p.dtype), dtype=torch.uint8) for p in parts]
    gpu.launched.clear()
    sizes = engine.encode_many(parts, Job("lossless"), outs)
    expected_launches = 1 if launch.SMALL_BLOCKS else 2  # large messages: one for the tables, one for the blocks
    assert len(gpu.launched) == expected_launches
    for part, out, size in zip(parts, outs, sizes):
        expected = torch.empty_like(out)
        assert reference.encode(part, Job("lossless"), expected) == size
        assert torch.equal(out[:size], expected[:size])
    backs = [torch.empty_like(part) for part in parts]
    engine.decode_many([out[:size] for out, size in zip(outs, sizes)], backs)
    assert all(same_bits(back, part) for back, part in zip(backs, parts))


@pytest.mark.parametrize("mode", ["lossless", "near"])
def test_a_hop_of_a_ring(gpu: emulated.Emulator, mode: str) -> None:
    """Decode, add and encode: the incoming tables code the sum."""
    x, local = gradient(9_000, seed=1), gradient(9_000, seed=2)
    floor = floors(9_000, "both") if mode == "near" else None
    body = torch.empty(body_bound(9_000, torch.float32), dtype=torch.uint8)
    body = body[: reference.encode(x, Job(mode), body, floor)]
    decoded = torch.empty(9_000)
    reference.decode(body, decoded, floor)
    tables = body[BODY_HEAD_BYTES : BODY_HEAD_BYTES + TABLE_BYTES * segments_of(9_000)].numpy().reshape(-1, TABLE_BYTES)
    lengths = torch.stack([torch.from_numpy(huffman.unpack_table(table)) for table in tables])
    expected = torch.empty(body_bound(9_000, torch.float32), dtype=torch.uint8)
    size = reference.encode(local + decoded, Job(mode, shift=1), expected, floor, lengths)
    out = torch.empty_like(expected)
    assert engines.load("cuda").decode_add_encode(body, local, Job(mode, shift=1), out, floor) == size
    assert torch.equal(out[:size], expected[:size])


@pytest.mark.parametrize("codec", ["gcomp:mode=lossless", "gcomp", "gcomp:mode=paper"])
def test_damaged_payloads_meet_the_same_end(gpu: emulated.Emulator, codec: str) -> None:
    x = gradient(4_500)
    x[3000:] = 0
    context = Context(floor=torch.full((4_500,), -13, dtype=torch.int8))
    frame = encoded("reference", codec, x, context)
    for at in range(24, frame.numel(), max(1, frame.numel() // 60)):
        damaged = frame.clone()
        damaged[at] ^= 1 << at % 8
        assert _outcome("cuda", codec, damaged, context) == _outcome("reference", codec, damaged, context), f"byte {at}"
    for length in range(0, frame.numel(), max(1, frame.numel() // 20)):
        assert _outcome("cuda", codec, frame[:length], context) is Truncated, f"{length} bytes"


def _outcome(engine: str, codec: str, payload: torch.Tensor, context: Context) -> list[int] | type[CodecError]:
    """The decoded bits, or the class of the error."""
    try:
        with engines.use(engine):
            return parse(codec).decode(payload, context).view(torch.int32).tolist()
    except CodecError as error:
        return type(error)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_of_nans_are_one_nan(gpu: emulated.Emulator, dtype: torch.dtype) -> None:
    x, there = gradient(5_000, dtype=dtype), gradient(5_000, seed=1, dtype=dtype)
    x[::3], there[::2] = with_payloads(x[::3]), with_payloads(there[::2])
    frame, sums = encoded("reference", "gcomp:mode=lossless", x, Context()), [there.clone(), there.clone()]
    for engine, total in zip(("reference", "cuda"), sums):
        with engines.use(engine):
            parse("gcomp:mode=lossless").decode(frame, Context(), out=total, add=True)
    assert same_bits(*sums)


def test_bodies_of_different_codings_are_added_once(gpu: emulated.Emulator) -> None:
    x, floor = gradient(5_000), floors(5_000, "given")
    bodies = []
    for mode in ("lossless", "near", "paper"):
        body = torch.empty(body_bound(5_000, torch.float32), dtype=torch.uint8)
        bodies.append(body[: reference.encode(x, Job(mode), body, floor)])
    sums = [torch.ones(5_000) for _ in bodies]
    engines.load("cuda").decode_many(bodies, sums, [floor] * 3, add=True)
    for body, found in zip(bodies, sums):
        expected = torch.ones(5_000)
        reference.decode(body, expected, floor, add=True)
        assert same_bits(found, expected)


def test_a_frame_in_near_mode_needs_floors(gpu: emulated.Emulator) -> None:
    x = gradient(5_000)
    body = torch.empty(body_bound(5_000, torch.float32), dtype=torch.uint8)
    size = reference.encode(x, Job("near"), body, floors(5_000, "given"))
    with pytest.raises(Unsupported, match="needs floor="):
        engines.load("cuda").decode(body[:size], torch.empty(5_000))


def test_lengths_that_are_no_code(gpu: emulated.Emulator) -> None:
    wrong = torch.ones(1, 256, dtype=torch.uint8)
    room = torch.empty(body_bound(100, torch.float32), dtype=torch.uint8)
    with pytest.raises(Unsupported, match="no complete code"):
        engines.load("cuda").encode(gradient(100), Job("lossless"), room, None, wrong)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_engine_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "emulator", None)
    with pytest.raises(EngineError, match="no CUDA device"):
        engines.load("cuda")
    with engines.use("cuda"), pytest.raises(GradzipError):
        parse("gcomp:mode=lossless").encode(torch.ones(10))


# --- On a GPU ----------------------------------------------------------------------------------------------------


@pytest.fixture(params=["small", "large"])
def family(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels for small messages, and those for large ones."""
    if request.param == "large":
        monkeypatch.setattr(launch, "SMALL_BLOCKS", 0)
        monkeypatch.setattr(launch, "SMALL_DECODED_BLOCKS", 0)
    launch._of_thread.workspaces.clear()


@pytest.mark.gpu
@pytest.mark.usefixtures("family")
@pytest.mark.parametrize("codec", MODES)
@pytest.mark.parametrize("numel", [1, 4097, 300_000])
def test_frames_cross_between_cpu_and_gpu(codec: str, numel: int) -> None:
    x = gradient(numel, seed=numel)
    x[:40] = special(40)[:numel]
    floor = floors(numel, "given")
    assert isinstance(floor, torch.Tensor)
    cpu, gpu = Context(floor=floor), Context(floor=floor.cuda())
    frame = parse(codec).encode(x, cpu)
    assert torch.equal(parse(codec).encode(x.cuda(), gpu).cpu(), frame)
    assert same_bits(parse(codec).decode(frame.cuda(), gpu).cpu(), parse(codec).decode(frame, cpu))


@pytest.mark.gpu
@pytest.mark.usefixtures("family")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("zeros", [0.0, 0.1, 1.0])
def test_large_inputs_come_back(dtype: torch.dtype, zeros: float) -> None:
    x = (torch.randn(5_000_001, device="cuda") * 1e-3).to(dtype)
    x[torch.rand(x.numel(), device="cuda") < zeros] = 0
    codec = parse("gcomp:mode=lossless")
    frame = codec.encode(x)
    assert same_bits(codec.decode(frame), x)
    total = torch.ones_like(x)
    codec.decode(frame, out=total, add=True)
    assert torch.equal(total, torch.ones_like(x) + x)


@pytest.mark.gpu
@pytest.mark.usefixtures("family")
@pytest.mark.parametrize("depth", [-184, -176, -168, -160])
def test_floors_are_the_same_on_both_sides(depth: int) -> None:
    """From nearly lossless to nearly all zero; the CPU floors are made from CPU copies of the optimizer's state."""
    numel = 400_000
    x = torch.randn(numel) * 1e-3
    theta, second = torch.randn(numel) * 0.05, torch.rand(numel) * 1e-8
    cpu = Context(floor=Floor(theta, second, depth, 0, 60), shift=1)
    gpu = Context(floor=Floor(theta.cuda(), second.cuda(), depth, 0, 60), shift=1)
    frame = parse("gcomp").encode(x, cpu)
    assert torch.equal(parse("gcomp").encode(x.cuda(), gpu).cpu(), frame)
    assert torch.equal(parse("gcomp").decode(frame.cuda(), gpu).cpu(), parse("gcomp").decode(frame, cpu))


@pytest.mark.gpu
@pytest.mark.usefixtures("family")
@pytest.mark.parametrize("codec", MODES)
def test_damaged_payloads(codec: str) -> None:
    """A damaged payload is refused or decodes to something, as on the CPU; it never brings the device down."""
    numel = 9000
    x = gradient(numel)
    floor = torch.full((numel,), -13, dtype=torch.int8)
    frame = parse(codec).encode(x, Context(floor=floor))
    positions = torch.randint(24, frame.numel(), (200,), generator=torch.Generator().manual_seed(2)).tolist()
    for at in positions:
        damaged = frame.clone()
        damaged[at] ^= 1 << at % 8
        results = []
        for device in ("cpu", "cuda"):
            try:
                back = parse(codec).decode(damaged.to(device), Context(floor=floor.to(device)))
                results.append(back.cpu().view(torch.int32).tolist())
            except CodecError:
                results.append(None)
        assert results[0] == results[1], f"byte {at}"


@pytest.mark.gpu
@pytest.mark.usefixtures("family")
def test_chunks_and_other_streams() -> None:
    x = torch.randn(3_000_000, device="cuda")
    engine = engines.load("cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        parts = list(x.chunk(8))
        outs = [torch.empty(body_bound(p.numel(), p.dtype), dtype=torch.uint8, device="cuda") for p in parts]
        sizes = engine.encode_many(parts, Job("lossless"), outs)
        backs = [torch.empty_like(part) for part in parts]
        engine.decode_many([out[:size] for out, size in zip(outs, sizes)], backs)
    assert all(same_bits(back, part) for back, part in zip(backs, parts))


@pytest.mark.gpu
@pytest.mark.usefixtures("family")
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["lossless", "near"])
def test_fifty_thousand_mutations(mode: str) -> None:
    """Decoded in batches. Each batch is refused or gives something; afterwards the device works as before."""
    engine, numel = engines.load("cuda"), 5000
    rng = torch.Generator().manual_seed(7)
    x = gradient(numel)
    x[4096:] = 0
    floor = torch.full((numel,), -13, dtype=torch.int8) if mode == "near" else None
    room = torch.empty(body_bound(numel, torch.float32), dtype=torch.uint8)
    body = room[: reference.encode(x, Job(mode), room, floor)]
    gpu_floor = None if floor is None else floor.cuda()
    outs = list(torch.empty(16, numel, device="cuda"))
    refused = 0
    for _ in range(50_000 // 16):
        damaged = body.repeat(16, 1)
        for row in damaged:
            count = int(torch.randint(1, 9, (1,), generator=rng))
            at = torch.randint(0, body.numel(), (count,), generator=rng)
            row[at] = torch.randint(0, 256, (count,), generator=rng).to(torch.uint8)
        try:
            engine.decode_many(list(damaged.cuda()), outs, None if gpu_floor is None else [gpu_floor] * 16)
        except GradzipError:
            refused += 1
    assert refused > 1000
    out = torch.empty(numel, device="cuda")
    engine.decode(body.cuda(), out, gpu_floor)
    expected = torch.empty(numel)
    reference.decode(body, expected, floor)
    assert same_bits(out.cpu(), expected)
