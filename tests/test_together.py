"""Leaves coded in one call: the same bytes, sums and residuals that every piece by itself gives, on every engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from conftest import floor_for, gradient, same_bits, special
from engine_cases import native_on
from hypothesis import given, settings
from hypothesis import strategies as st

from gradzip import Context, engines, parse
from gradzip.codecs.gcomp import GComp
from gradzip.collectives import Exchange, together
from gradzip.collectives.coder import TensorCoder
from gradzip.collectives.executor import Executor
from gradzip.collectives.layout import Piece, chunks
from gradzip.collectives.terms import How, Steps
from gradzip.collectives.together import Frames, Leaf, OnGpu, coding_together
from gradzip.engines import native
from gradzip.engines.layout import Floor, Job
from gradzip.errors import Corrupt, PeerError
from gradzip.exchange.peers.buffers import Buffers
from gradzip.exchange.topology import Members
from gradzip.feedback import Memory
from gradzip.routes import NAMED, Route

CODECS = (
    *("gcomp:mode=lossless", "gcomp:keep=7", "gcomp:keep=3", "gcomp:keep=5,round=truncate,feedback=bf16"),
    *("gcomp", "gcomp:ulps=4096", "gcomp:mode=paper", "gcomp:mode=lossless,book=shared", "gcomp:book=shared"),
    *("gcomp:own=lossless", "gcomp:ulps=4096,own=lossless", "gcomp:own=lossless,book=shared"),
    *("gcomp:feedback=true", "gcomp:own=near"),
)
ON_GPU = (
    *("gcomp:mode=lossless", "gcomp:keep=3", "gcomp:ulps=4096", "gcomp:book=shared"),
    *("gcomp:feedback=true", "gcomp:ulps=4096,own=lossless"),
)
WORLD, SIZES, FEW, STEPS = 3, (4200, 2, 0, 300), (300, 2, 0, 500), 2


@pytest.fixture(params=[*native.available_isas(), "cuda"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The native engine on each instruction set, and the cuda engine's kernels on the CPU."""
    if request.param == "cuda":
        emulated = pytest.importorskip("emulated")
        if emulated.COMPILER is None:
            pytest.skip("the emulated GPU needs a C++ compiler")
        from gradzip.engines.cuda import launch

        monkeypatch.setattr(launch, "emulator", emulated.Emulator())
        yield "cuda"
    else:
        with native_on(request.param):
            yield "native"


# --- Exchanges -------------------------------------------------------------------------------------------------------


class Ranks:
    """A few ranks in one thread, which take turns; their memories live from step to step.

    Every other gradient, on each rank others, is one of BF16 arithmetic: with `own=auto` frames of both kinds meet.
    """

    def __init__(self, codec: str, scale: float, sizes: tuple[int, ...], device: str = "cpu") -> None:
        self.codec, self.scale, self.sizes, self.device = parse(codec), scale, sizes, torch.device(device)
        self.memories = [Memory(rank) for rank in range(WORLD)]
        for memory in self.memories:
            memory.forms = {str(i): self.codec.error_memory for i in range(len(sizes))}

    def own(self, rank: int, number: int, step: int = 0) -> torch.Tensor:
        """What a rank has of a tensor."""
        x = gradient(self.sizes[number], seed=100 * step + 10 * rank + number)
        return (x.bfloat16().float() if (rank + number) % 2 else x) * self.scale

    def mean(self, route: Route, step: int, apart: bool = False) -> list[list[torch.Tensor]]:
        """What all ranks end with; `apart`: each tensor in a message of its own."""
        numbers = range(len(self.sizes))
        results = [[self.own(rank, i, step).to(self.device) for i in numbers] for rank in range(WORLD)]
        for message in [[i] for i in numbers] if apart else [list(numbers)]:
            self._exchange([[of_rank[i] for i in message] for of_rank in results], message, route, step)
        for memory in self.memories:
            memory.commit()
        return results

    def _exchange(self, tensors_of: list[list[torch.Tensor]], numbers: list[int], route: Route, step: int) -> None:
        runs, sizes = [], [self.sizes[i] for i in numbers]
        for rank, memory in enumerate(self.memories):
            tensors = tensors_of[rank]
            contexts = [
                Context(str(i), step, rank=rank, world=WORLD, scale=self.scale, floor=self.floor(x, i))
                for i, x in zip(numbers, tensors)
            ]
            buffers = Buffers(pinned=self.device.type == "cuda")
            coder = TensorCoder(self.codec, tensors, contexts, memory, buffers, self.scale, WORLD)
            coder.prepare()
            runs.append((rank, coder))
        for layout in chunks(sizes, WORLD, True, part=sum(self.sizes) // 9):
            everyone = [Members(rank, tuple(range(WORLD))) for rank in range(WORLD)]
            members = [{"flat": m, "intra": m, "inter": Members(0, (rank,))} for rank, m in enumerate(everyone)]
            drive([Executor(route, layout, coder, members[rank], WORLD).steps() for rank, coder in runs])
        for _, coder in runs:
            coder.finish()

    def floor(self, x: torch.Tensor, number: int) -> Floor | torch.Tensor | None:
        assert isinstance(self.codec, GComp)
        if self.codec.mode == "near":
            return floor_for(x, seed=number, depth=12 if self.codec.ulps == 1 else 3).to(self.device)
        return torch.full((x.numel(),), -6, dtype=torch.int8) if self.codec.mode == "paper" else None


def test_reaches_are_coded_piece_by_piece() -> None:
    """They are compared with the values that are encoded, and of a sum those are known only when it is formed."""
    codec, x = parse("gcomp:mode=paper"), torch.randn(5000)
    assert coding_together(codec, [x], [Context(floor=torch.zeros(5000, dtype=torch.int8))], [False]) is not None
    assert coding_together(codec, [x], [Context(floor=torch.ones(5000))], [False]) is None


def drive(ranks: list[Steps]) -> None:
    """Advances all ranks from exchange to exchange."""
    received: list[Any] = [None] * len(ranks)
    while True:
        wanted = []
        for steps, parts in zip(ranks, received):
            try:
                wanted.append(steps.send(parts))
            except StopIteration:
                continue
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # what is to be sent may still be on its way
        if not wanted:
            return
        assert len(wanted) == len(ranks)
        assert all(isinstance(w, Exchange) for w in wanted)
        if len(wanted[0].send) == 1:  # type: ignore[union-attr]  # each is a group by itself
            received = [[copied(each.send[0])] for each in wanted]  # type: ignore[union-attr]
            continue
        received = [[copied(sender.send[i]) for sender in wanted] for i in range(len(ranks))]  # type: ignore[union-attr]
        for rank, (each, parts) in enumerate(zip(wanted, received)):
            for other, part in enumerate(parts):
                if each.landing is not None and part is not None and other not in (rank, 0):  # type: ignore[union-attr]
                    each.landing(other, part)  # type: ignore[union-attr]  # as the pipeline does, but for one of them


def copied(part: torch.Tensor | None) -> torch.Tensor | None:
    return None if part is None else part.clone()


def exchanged(
    engine: str, codec: str, route: str, sizes: tuple[int, ...]
) -> tuple[list[torch.Tensor], list[dict[str, Any]]]:
    ranks, seen = Ranks(codec, 3.0 if "4096" in codec else 1.0, sizes), []
    with engines.use(engine):
        for step in range(STEPS):
            seen += [tensor for of_rank in ranks.mean(NAMED[route], step) for tensor in of_rank]
    return seen, [memory.state_dict() for memory in ranks.memories]


@pytest.mark.parametrize("route", ["alltoall", "ring", "allgather"])
@pytest.mark.parametrize("codec", CODECS)
def test_exchanges_do_not_depend_on_how_leaves_are_coded(engine: str, codec: str, route: str) -> None:
    if engine == "cuda" and (route != "alltoall" or codec not in ON_GPU):
        pytest.skip("the emulated GPU is slow, and adds nothing here")
    sizes = FEW if engine == "cuda" else SIZES
    expected, left = exchanged("reference", codec, route, sizes)
    found, kept = exchanged(engine, codec, route, sizes)
    assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))
    found_out = {value for state in kept for key, value in state.items() if key.endswith("own_lossless")}
    assert found_out == ({0, 1} if codec in ("gcomp", "gcomp:feedback=true", "gcomp:book=shared") else found_out)
    for ours, theirs in zip(kept, left):
        assert ours.keys() == theirs.keys()
        assert all(same_bits(torch.as_tensor(ours[key]), torch.as_tensor(theirs[key])) for key in ours)


@pytest.mark.parametrize("engine", ["cuda"], indirect=True)
@pytest.mark.parametrize("codec", ["gcomp:mode=lossless", "gcomp"])
def test_many_pieces_come_from_the_gpu_as_one(engine: str, codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in messages of many tensors, here of a few: frames are put together there, and are the same bytes."""
    monkeypatch.setattr(together, "FEW_PIECES", 0)
    monkeypatch.delattr(OnGpu, "_deliver")
    expected, _ = exchanged("reference", codec, "alltoall", FEW)
    found, _ = exchanged(engine, codec, "alltoall", FEW)
    assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("route", ["alltoall", "gather"])
@pytest.mark.parametrize("codec", ["gcomp", "gcomp:book=shared", "gcomp:own=lossless", "gcomp:mode=lossless"])
def test_exchanges_on_a_gpu(codec: str, route: str) -> None:
    """With `own=auto` frames of both kinds meet. Means may differ in their last bit: a GPU divides in another way."""
    here, there = (Ranks(codec, 1.0, (300_000, *SIZES), device) for device in ("cpu", "cuda"))
    for step in range(STEPS):
        expected, found = here.mean(NAMED[route], step), there.mean(NAMED[route].on("gpu"), step)
        for of_rank in found:
            assert all(same_bits(a, b) for a, b in zip(of_rank, found[0], strict=True))
        for ours, theirs in zip(found[0], expected[0], strict=True):
            torch.testing.assert_close(ours.cpu(), theirs, rtol=3e-7, atol=0)
    kept = {v for m in there.memories for key, v in m.state_dict().items() if key.endswith("own_lossless")}
    assert kept == ({0, 1} if codec in ("gcomp", "gcomp:book=shared") else kept)


@pytest.mark.parametrize("route", ["alltoall", "allgather"])
def test_own_gradients_may_go_lossless(engine: str, route: str) -> None:
    """Only sums lie on a grid then, and nothing is lost of what a rank has."""
    sizes = FEW if engine == "cuda" else SIZES
    ranks, near = Ranks("gcomp:own=lossless", 1.0, sizes), parse("gcomp")
    with engines.use(engine):
        results = ranks.mean(NAMED[route], 0)
    for number in range(len(sizes)):
        of_ranks = [ranks.own(rank, number) for rank in range(WORLD)]
        total = sum(of_ranks[1:], of_ranks[0])
        if route == "alltoall":
            context = Context(floor=ranks.floor(total, number), shift=WORLD.bit_length() - 1)
            total = near.decode(near.encode(total, context), context)
        for of_rank in results:
            assert same_bits(of_rank[number], total / WORLD)


class Turns(Ranks):
    """Gradients that have all bits at steps that nobody looks at."""

    def own(self, rank: int, number: int, step: int = 0) -> torch.Tensor:
        x = gradient(self.sizes[number], seed=100 * step + 10 * rank + number)
        return x if step in (3, 5, 6) else x.bfloat16().float()


@pytest.mark.parametrize("codec", ["gcomp", "gcomp:feedback=true", "gcomp:book=shared"])
def test_what_was_found_of_own_gradients_is_resumed(codec: str) -> None:
    """And it is found of each tensor by itself, whatever it travels with."""
    route, names = NAMED["alltoall"], [f"rank{rank}/codec/gcomp/0/own_lossless" for rank in range(WORLD)]
    with engines.use("native"):
        through, apart = Turns(codec, 1.0, SIZES), Turns(codec, 1.0, SIZES)
        for step in range(6):
            results = through.mean(route, step)
            assert all(same_bits(a, b) for a, b in zip(results[0], apart.mean(route, step, apart=True)[0], strict=True))
        resumed, forgetful = Turns(codec, 1.0, SIZES), Turns(codec, 1.0, SIZES)
        for memory, other, name in zip(through.memories, resumed.memories, names):
            assert memory.state_dict()[name] == 1
            shapes = {str(i): torch.Size([size]) for i, size in enumerate(SIZES)}
            other.load_state_dict(memory.state_dict(), shapes, torch.device("cpu"))
        results, again, anew = (each.mean(route, 6) for each in (through, resumed, forgetful))
    for ours, theirs in zip(results, again):
        assert all(same_bits(a, b) for a, b in zip(ours, theirs, strict=True))
    assert not same_bits(results[0][0], anew[0][0]), "or nothing has to be remembered"


def test_a_plain_sum_on_the_way_keeps_the_grid() -> None:
    """Near mode's grid is that of sums: who divides before the last encode rounds as many times as coarsely."""
    plainly = Route.parse("enc.cpu > a2a.intra > dec.cpu > ar.inter > enc.cpu > ag.intra > dec.cpu")
    for codec in ("gcomp", "gcomp:ulps=4096", "gcomp:own=lossless"):
        with engines.use("native"):
            found, expected = (Ranks(codec, 1.0, SIZES).mean(route, 0) for route in (plainly, NAMED["alltoall"]))
        for ours, theirs in zip(found, expected, strict=True):
            assert all(same_bits(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("codec", ["gcomp:ulps=4096", "gcomp:keep=3"])
def test_a_gradient_that_is_coded_twice_loses_once(codec: str) -> None:
    """In a group of one there is nothing to add between two encodes; what the first one lost is still held back."""
    twice = Route.parse(
        "enc.cpu > a2a.inter > dec.cpu > enc.cpu > a2a.intra > dec.cpu > enc.cpu > ag.intra > dec.cpu > ag.inter"
    )
    for engine in ("native", "reference"):
        with engines.use(engine):
            found, expected = Ranks(codec, 1.0, SIZES), Ranks(codec, 1.0, SIZES)
            for step in range(STEPS):
                ours, theirs = found.mean(twice, step), expected.mean(NAMED["alltoall"], step)
                assert all(same_bits(a, b) for of_a, of_b in zip(ours, theirs) for a, b in zip(of_a, of_b))


def test_the_engines_are_used(engine: str) -> None:
    """Or the comparison above would compare the slow way with itself."""
    x = [gradient(10)]
    with engines.use(engine):
        assert coding_together(parse("gcomp:keep=7"), x, [Context()], [False]) is not None
    with engines.use("reference"):
        assert coding_together(parse("gcomp:keep=7"), x, [Context()], [False]) is None


@pytest.mark.parametrize("place", [0, 9, 17, 40, 60])
def test_a_damaged_leaf_names_rank_and_tensor(engine: str, place: int) -> None:
    x = gradient(5000, seed=1)
    coder = TensorCoder(parse("gcomp:mode=lossless"), [x], [Context("w", rank=0)], Memory(0), Buffers(), 1.0, 2)
    layout = chunks([x.numel()], 2, True)[0]
    with engines.use(engine):
        coder.prepare()
        how = How("cpu", 0, 1, 0)
        (blob,) = coder.encode([layout], [coder.load(layout)], how)
        damaged = blob.data.clone()
        damaged[place] ^= 0x55
        out = torch.zeros(5000)
        with pytest.raises(PeerError, match="rank 1 sent 'w' damaged"):
            coder.decode([layout], [[blob], [blob._replace(data=damaged, source=1, values=None)]], how, [[out]], False)
        coder.decode([layout], [[blob]], how, [[out]], False)
    assert same_bits(out, x)


@pytest.mark.parametrize("codec", ["gcomp:own=near", "gcomp:own=lossless"])
def test_a_frame_that_a_ring_cannot_pass_on_names_rank_and_tensor(engine: str, codec: str) -> None:
    x = gradient(5000, seed=1)
    contexts = [Context("w", rank=0, floor=floor_for(x))]
    coder = TensorCoder(parse(codec), [x], contexts, Memory(0), Buffers(), 1.0, 3)
    layout = chunks([x.numel()], 3, True)[0]
    with engines.use(engine):
        coder.prepare()
        (blob,) = coder.encode([layout], [coder.load(layout)], How("cpu", 0, 1, 0))
        blob = blob._replace(source=1, values=None)
        coder.hop(layout, blob, [x], How("cpu", 1, 2, 0))
        for place, flipped in ((0, 1), (16, 1), (32, 1), (100, 0x55)):  # the size, the count, the coding, a table
            damaged = blob.data.clone()
            damaged[place] ^= flipped
            with pytest.raises(PeerError, match="rank 1 sent 'w' damaged"):
                coder.hop(layout, blob._replace(data=damaged), [x], How("cpu", 1, 2, 0))


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=30),
    seen=st.integers(0, 12_000),
    seed=st.integers(0, 1000),
)
def test_frames_that_stay_on_a_gpu(sizes: list[int], seen: int, seed: int) -> None:
    """The same bytes as in the host's memory, and the same bodies found by however little the host sees of them."""
    codec, draw = parse("gcomp:mode=lossless"), torch.Generator().manual_seed(seed)
    assert isinstance(codec, GComp)
    xs = [torch.zeros(size) for size in sizes]
    bodies = [torch.randint(256, (8 + size,), dtype=torch.uint8, generator=draw) for size in sizes]
    for body in bodies:
        body[4:8] = 0  # the book
    on_gpu = OnGpu(codec, [Context()], native, xs, [False] * len(xs))
    rooms = [torch.full((sum(sizes) + 100 * len(sizes),), 255, dtype=torch.uint8) for _ in range(2)]
    written = on_gpu._deliver(bodies, xs, rooms[0])
    leaf = Leaf([Piece(0, 0, size) for size in sizes], xs, rooms[1])
    on_gpu._deliver_there([(leaf, bodies)])
    assert leaf.size == written
    assert torch.equal(*rooms)
    frames = rooms[1][:written]
    found = on_gpu._bodies(Frames(frames, frames[:seen].clone().numpy().data), xs)
    assert found.book == 0
    assert all(torch.equal(a, b) for a, b in zip(found.data, bodies, strict=True))
    assert list(found.plain) == [int(body[0]) == 0 for body in bodies]
    for bad in (frames[:-1], frames[: 8 * len(sizes) - 1], torch.cat([frames, frames[:8]])):
        with pytest.raises(Corrupt):
            on_gpu._bodies(Frames(bad, bad[:seen].numpy().data), xs)


# --- The native engine's calls ---------------------------------------------------------------------------------------


def pieces(sizes: Sequence[int], seed: int) -> list[torch.Tensor]:
    return [special(size) if size % 5 == 4 else gradient(size, seed + i) for i, size in enumerate(sizes)]


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.sampled_from([1, 5, 100, 4096, 5004, 9001]), min_size=1, max_size=4),
    codec=st.sampled_from(["gcomp:mode=lossless", "gcomp:keep=7", "gcomp:keep=0,round=truncate", "gcomp"]),
    seed=st.integers(0, 1000),
    isa=st.sampled_from(native.available_isas()),
)
def test_frames_sums_and_losses(sizes: list[int], codec: str, seed: int, isa: str) -> None:
    chosen, xs = parse(codec), pieces(sizes, seed)
    assert isinstance(chosen, GComp)
    contexts = [Context(floor=floor_for(x, seed) if codec == "gcomp" else None) for x in xs]
    floors, job = [c.floor for c in contexts], chosen._job(Context())
    out = torch.empty(sum(32 + chosen.bound(n, torch.float32) for n in sizes), dtype=torch.uint8)
    lost = [torch.empty(n) for n in sizes]
    before = native.isa()
    native.set_isa(isa)
    try:
        size = native.encode_frames(xs, job, GComp.wire_id, out, floors, lost=lost, scale=3.0)
        at = 8 * len(xs)
        for x, context, n in zip(xs, contexts, out[:at].view(torch.int64).tolist()):
            assert torch.equal(out[at : at + n], chosen.encode(x, context))
            at += n + -n % 8
        assert at == size
        decoded = [chosen.decode(chosen.encode(x, c), c) for x, c in zip(xs, contexts)]
        for x, y, got in zip(xs, decoded, lost):
            expected = (x - y) / 3.0
            assert same_bits(got[expected.isfinite()], expected[expected.isfinite()])
            assert torch.equal(got.isnan(), expected.isnan())
        others = [torch.empty(n) for n in sizes]
        native.note_lost(xs, job, floors, others, 3.0)
        assert all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(others, lost))
        sums = [torch.ones(n) for n in sizes]
        native.sum_frames([xs, out[:size], xs], job, GComp.wire_id, sums, floors, add=True)
        for y, got in zip(decoded, sums):
            expected = torch.ones_like(y).add_(y).add_(y).add_(y)
            assert torch.equal(got.nan_to_num(7.0), expected.nan_to_num(7.0))
    finally:
        native.set_isa(before)


def test_damaged_frames_name_their_part() -> None:
    xs, job = pieces([5000, 7], 3), Job("lossless")
    out = torch.empty(60000, dtype=torch.uint8)
    good = out[: native.encode_frames(xs, job, GComp.wire_id, out, [None, None])]
    outs = [torch.empty(5000), torch.empty(7)]
    for bad in (good[:-1], good[:8], good[:0], torch.cat([good, good[:8]]), good ^ 1):
        with pytest.raises(native.DamagedFrames) as caught:
            native.sum_frames([xs, good, bad.clone()], job, GComp.wire_id, outs, [None, None], add=False)
        assert caught.value.part == 2


@pytest.mark.parametrize("kind", ["reference", "native"])
@pytest.mark.parametrize("route", ["alltoall", "ring", "rs.flat > enc.cpu > ag.flat > dec.cpu"])
def test_what_is_not_coded_is_not_sent_again(kind: str, route: str) -> None:
    """The same gradients in every step: with feedback the results add up to as many means, and no more."""
    ranks, steps = Ranks("gcomp:keep=3", 1.0, FEW), 4
    chosen = NAMED[route] if route in NAMED else Route.parse(route)
    with engines.use(kind):
        total = sum(torch.cat(ranks.mean(chosen, 0)[1]) for _ in range(steps))
    alone = [[ranks.own(rank, i) for i in range(len(FEW))] for rank in range(WORLD)]
    mean = torch.stack([torch.cat(own) for own in alone]).mean(0)
    assert torch.allclose(total, steps * mean, atol=2 * 2**-4 * float(mean.abs().max()), rtol=0)
    assert float((total - steps * mean).norm() / (steps * mean).norm()) < 0.05
