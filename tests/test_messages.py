"""Codecs of one round in whole messages: the interpreter's results, residuals and codec state, on every engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from conftest import floor_for, gradient, same_bits
from engine_cases import native_on

from gradzip import Context, engines, parse
from gradzip.engines import native
from gradzip.engines.layout import Floor
from gradzip.errors import CodecError
from gradzip.exchange.coding import Coder, Message, Values
from gradzip.exchange.compiler import compile_route
from gradzip.exchange.interpreter import Interpreter
from gradzip.exchange.message_codecs import message_codec
from gradzip.exchange.parts import Table
from gradzip.exchange.program import Hop, Program
from gradzip.exchange.topology import Topology
from gradzip.feedback import Memory
from gradzip.routes import NAMED, Route

GCOMP = (
    *("gcomp:mode=lossless", "gcomp:keep=7", "gcomp:keep=3", "gcomp:keep=5,round=truncate,feedback=bf16"),
    *("gcomp", "gcomp:ulps=4096", "gcomp:mode=paper", "gcomp:mode=lossless,book=shared", "gcomp:book=shared"),
    *("gcomp:own=lossless", "gcomp:ulps=4096,own=lossless", "gcomp:own=lossless,book=shared"),
    *("gcomp:feedback=true", "gcomp:own=near"),
)
OTHERS = (
    *("zlib", "cast:to=bf16,feedback=true", "topk:ratio=0.1", "threshold:value=0.5", "randomk:ratio=0.2", "sign"),
    *("qsgd:bits=4", "onebit", "terngrad", "natural", "dgc:ratio=0.1", "randomblock:ratio=0.2"),
)
WORLD, SIZES, STEPS = 3, (1536, 2, 0, 768), 3


class Ranks:
    """All ranks in one process; their memories live from step to step.

    Every other gradient, on each rank others, is one of BF16 arithmetic: with `own=auto` frames of both kinds meet.
    """

    def __init__(self, codec: str, route: Route, topology: Topology, sizes: Sequence[int] = SIZES) -> None:
        self.codec, self.route, self.topology, self.sizes = parse(codec), route, topology, sizes
        self.scale = 3.0 if "4096" in codec else 1.0
        self.memories = [Memory(rank) for rank in range(topology.world)]

    def own(self, rank: int, number: int, step: int) -> torch.Tensor:
        x = gradient(self.sizes[number], seed=100 * step + 10 * rank + number)
        return (x.bfloat16().float() if (rank + number) % 2 else x) * self.scale

    def floor(self, number: int) -> Floor | torch.Tensor | None:
        mode, size = getattr(self.codec, "mode", ""), self.sizes[number]
        if mode == "near":
            return floor_for(torch.zeros(size), seed=number, depth=12 if "4096" not in str(self.codec) else 3)
        return torch.full((size,), -6, dtype=torch.int8) if mode == "paper" else None

    def program(self, numbers: Sequence[int], dtype: torch.dtype = torch.float32) -> Program:
        codec = message_codec(self.codec)
        assert codec is not None
        names, sizes = [f"t{i}" for i in numbers], [self.sizes[i] for i in numbers]
        return compile_route(codec.text, self.route, names, sizes, dtype, self.topology, codec.codes_sums)

    def mean(self, step: int, packed: Sequence[Sequence[int]] | None = None) -> list[list[torch.Tensor]]:
        """What all ranks end with; `packed`: the tensors of each message."""
        world, results = self.topology.world, [[torch.empty(0)] * len(self.sizes) for _ in self.memories]
        for numbers in packed or [range(len(self.sizes))]:
            messages = [
                Message([f"t{i}" for i in numbers], torch.float32, rank, world, step, scale=self.scale, memory=memory)
                for rank, memory in enumerate(self.memories)
            ]
            for message in messages:
                message.floors = [self.floor(i) for i in numbers]
            codec = message_codec(self.codec)
            assert codec is not None
            gradients = [[self.own(rank, i, step) for i in numbers] for rank in range(world)]
            means = Interpreter(self.program(numbers), codec, messages).run(gradients)
            for rank, of_rank in enumerate(means):
                for i, mean in zip(numbers, of_rank):
                    results[rank][i] = mean
        for memory in self.memories:
            memory.commit()
        return results


FLAT = Topology(0, ((0,), (1,), (2,)))
PAIRS = Topology(0, ((0, 1), (2, 3)))


def exchanged(
    engine: str, codec: str, route: Route, topology: Topology = FLAT, packed: Sequence[Sequence[int]] | None = None
) -> tuple[list[torch.Tensor], list[dict[str, Any]]]:
    ranks, seen = Ranks(codec, route, topology), []
    with engines.use(engine):
        for step in range(STEPS):
            seen += [tensor for of_rank in ranks.mean(step, packed) for tensor in of_rank]
    return seen, [memory.state_dict() for memory in ranks.memories]


def check_same(found: tuple[list[torch.Tensor], list[dict[str, Any]]], expected: Any) -> None:
    assert all(same_bits(a, b) for a, b in zip(found[0], expected[0], strict=True))
    for ours, theirs in zip(found[1], expected[1], strict=True):
        assert ours.keys() == theirs.keys()
        assert all(same_bits(torch.as_tensor(ours[key]), torch.as_tensor(theirs[key])) for key in ours)


@pytest.mark.parametrize("route", ["alltoall", "ring"])
@pytest.mark.parametrize("codec", GCOMP)
def test_parts_in_one_call_give_the_bits_of_parts_one_by_one(codec: str, route: str) -> None:
    expected = exchanged("reference", codec, NAMED[route])
    for isa in native.available_isas():
        with native_on(isa):
            found = exchanged("native", codec, NAMED[route])
        check_same(found, expected)
    known = {value for state in found[1] for key, value in state.items() if key.endswith("own_lossless")}
    assert known == ({0, 1} if codec in ("gcomp", "gcomp:feedback=true", "gcomp:book=shared") else known)


@pytest.mark.parametrize("codec", [*GCOMP, *OTHERS])
@pytest.mark.parametrize("route", sorted(NAMED))
def test_replicas_agree_and_packing_changes_nothing(codec: str, route: str) -> None:
    if not NAMED[route].compresses:
        pytest.skip("nothing is coded")
    topology = PAIRS if NAMED[route].hierarchical else FLAT
    whole = exchanged("native", codec, NAMED[route], topology)
    for first in range(0, len(whole[0]), len(SIZES) * topology.world):
        step = whole[0][first : first + len(SIZES) * topology.world]
        assert all(same_bits(x, step[i % len(SIZES)]) for i, x in enumerate(step))
    check_same(exchanged("native", codec, NAMED[route], topology, [[3, 1], [0], [2]]), whole)


# --- What own gradients and sums are coded by ------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["native", "reference"])
@pytest.mark.parametrize("route", ["alltoall", "allgather"])
def test_own_gradients_may_go_lossless(engine: str, route: str) -> None:
    """Only sums lie on a grid then, and nothing is lost of what a rank has."""
    ranks, near = Ranks("gcomp:own=lossless", NAMED[route], FLAT), parse("gcomp")
    with engines.use(engine):
        results = ranks.mean(0)
    for number in range(len(SIZES)):
        of_ranks = [ranks.own(rank, number, 0) for rank in range(WORLD)]
        total = sum(of_ranks[1:], of_ranks[0])
        if route == "alltoall":
            context = Context(floor=ranks.floor(number), shift=WORLD.bit_length() - 1)
            total = near.decode(near.encode(total, context), context)
        for of_rank in results:
            assert same_bits(of_rank[number], total / WORLD)


class Turns(Ranks):
    """Gradients that have all bits at steps that nobody looks at."""

    def own(self, rank: int, number: int, step: int) -> torch.Tensor:
        x = gradient(self.sizes[number], seed=100 * step + 10 * rank + number)
        return x if step in (3, 5, 6) else x.bfloat16().float()


@pytest.mark.parametrize("codec", ["gcomp", "gcomp:feedback=true", "gcomp:book=shared"])
def test_what_was_found_of_own_gradients_is_resumed(codec: str) -> None:
    """And it is found of each tensor by itself, whatever it travels with."""
    names = [f"rank{rank}/codec/gcomp/t0/own_lossless" for rank in range(WORLD)]
    apart_each = [[number] for number in range(len(SIZES))]
    with engines.use("native"):
        through, apart, resumed, forgetful = (Turns(codec, NAMED["alltoall"], FLAT) for _ in range(4))
        for step in range(6):
            results = through.mean(step)
            assert all(same_bits(a, b) for a, b in zip(results[0], apart.mean(step, apart_each)[0], strict=True))
        for memory, other, name in zip(through.memories, resumed.memories, names):
            assert memory.state_dict()[name] == 1
            shapes = {f"t{i}": torch.Size([size]) for i, size in enumerate(SIZES)}
            other.load_state_dict(memory.state_dict(), shapes, torch.device("cpu"))
        results, again, anew = (each.mean(6) for each in (through, resumed, forgetful))
    for ours, theirs in zip(results, again):
        assert all(same_bits(a, b) for a, b in zip(ours, theirs, strict=True))
    assert not same_bits(results[0][0], anew[0][0]), "or nothing has to be remembered"


def test_a_plain_sum_on_the_way_keeps_the_grid() -> None:
    """Near mode's grid is that of sums: who divides before the last encode rounds as many times as coarsely."""
    plainly = Route.parse("enc.cpu > a2a.intra > dec.cpu > ar.inter > enc.cpu > ag.intra > dec.cpu")
    together = Topology(0, ((0, 1, 2),))
    for codec in ("gcomp", "gcomp:ulps=4096", "gcomp:own=lossless"):
        with engines.use("native"):
            found = Ranks(codec, plainly, together).mean(0)
            expected = Ranks(codec, NAMED["alltoall"], together).mean(0)
        for ours, theirs in zip(found, expected, strict=True):
            assert all(same_bits(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("codec", ["gcomp:ulps=4096", "gcomp:keep=3"])
def test_a_gradient_that_is_coded_twice_loses_once(codec: str) -> None:
    """In a group of one there is nothing to add between two encodes; what the first one lost is still held back."""
    twice = Route.parse(
        "enc.cpu > a2a.inter > dec.cpu > enc.cpu > a2a.intra > dec.cpu > enc.cpu > ag.intra > dec.cpu > ag.inter"
    )
    together = Topology(0, ((0, 1, 2),))
    for engine in ("native", "reference"):
        with engines.use(engine):
            found, expected = Ranks(codec, twice, together), Ranks(codec, NAMED["alltoall"], together)
            for step in range(STEPS):
                ours, theirs = found.mean(step), expected.mean(step)
                assert all(same_bits(a, b) for of_a, of_b in zip(ours, theirs) for a, b in zip(of_a, of_b))


class Repeated(Ranks):
    """The same gradients in every step."""

    def own(self, rank: int, number: int, step: int) -> torch.Tensor:
        return super().own(rank, number, 0)


@pytest.mark.parametrize("engine", ["reference", "native"])
@pytest.mark.parametrize("route", ["alltoall", "ring", "rs.flat > enc.cpu > ag.flat > dec.cpu"])
def test_what_is_not_coded_is_not_sent_again(engine: str, route: str) -> None:
    """With feedback the results add up to as many means, and no more."""
    ranks, steps = Repeated("gcomp:keep=3", Route.parse(route), FLAT), 4
    with engines.use(engine):
        total = torch.stack([torch.cat(ranks.mean(step)[1]) for step in range(steps)]).sum(0)
    alone = [torch.cat([ranks.own(rank, i, 0) for i in range(len(SIZES))]) for rank in range(WORLD)]
    mean = torch.stack(alone).mean(0)
    assert torch.allclose(total, steps * mean, atol=2 * 2**-4 * float(mean.abs().max()), rtol=0)
    assert float((total - steps * mean).norm() / (steps * mean).norm()) < 0.05


# --- Damage ----------------------------------------------------------------------------------------------------------


def coded(codec: str, x: torch.Tensor) -> tuple[Coder, Table, torch.Tensor]:
    """A coder that knows a gradient, and the frame of all of it."""
    whole, table = message_codec(parse(codec)), Table.of(["w"], [x.numel()], [1])
    assert whole is not None
    floors = [floor_for(x)] if "mode=lossless" not in codec else []
    coder = whole.coder(Message(["w"], torch.float32, 0, 3, floors=floors))
    coder.measure(Values([x]))
    room = torch.empty(whole.bound(table, 0, torch.float32), dtype=torch.uint8)
    (size,) = coder.encode(table, [0], Values([x]), Hop(0, 1, True, False), [room])
    return coder, table, room[:size]


@pytest.mark.parametrize("engine", ["native", "reference"])
@pytest.mark.parametrize("place", [0, 9, 17, 40, 60])
def test_damage_of_a_frame_is_noticed(engine: str, place: int) -> None:
    """The runner names the rank that sent it (test_faults.py)."""
    x, out, hop = gradient(5000, seed=1), torch.zeros(5000), Hop(0, 1, True, False)
    with engines.use(engine):
        coder, table, frame = coded("gcomp:mode=lossless", x)
        damaged = frame.clone()
        damaged[place] ^= 0x55
        with pytest.raises(CodecError):
            coder.decode(table, 0, [frame, damaged], None, hop, Values([out]), 1)
        coder.decode(table, 0, [frame], None, hop, Values([out]), 1)
    assert same_bits(out, x)


@pytest.mark.parametrize("engine", ["native", "reference"])
@pytest.mark.parametrize("codec", ["gcomp:own=near", "gcomp:own=lossless"])
def test_a_frame_that_a_ring_cannot_pass_on_is_noticed(engine: str, codec: str) -> None:
    x, ring, then = gradient(5000, seed=1), Hop(0, 1, True, False, ring=True), Hop(1, 2, False, True, ring=True)
    with engines.use(engine):
        coder, table, frame = coded(codec, x)
        room = torch.empty(3 * frame.numel() + 65536, dtype=torch.uint8)
        assert coder.recode(table, 0, [frame, None], Values([x]), ring, 1, then, room) > 0
        for place, flipped in ((0, 1), (16, 1), (32, 1), (100, 0x55)):  # the size, the count, the coding, a table
            damaged = frame.clone()
            damaged[place] ^= flipped
            with pytest.raises(CodecError):
                coder.recode(table, 0, [damaged, None], Values([x]), ring, 1, then, room)
