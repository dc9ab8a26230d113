"""Programs: every route compiles, and the interpreter adds up and encodes as the route says."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from conftest import gradient, same_bits

from gradzip.errors import Unsupported
from gradzip.exchange.coding import Coder, Message, MessageCodec, Raw, Values
from gradzip.exchange.compiler import compile_route, lowered
from gradzip.exchange.interpreter import Interpreter
from gradzip.exchange.parts import Table, name_hash
from gradzip.exchange.program import VALUES, Communicate, Encode, Hop, Program, Recode
from gradzip.exchange.topology import Topology
from gradzip.routes import NAMED, Route, tree

WORLD = 4
PAIRS = Topology(0, ((0, 1), (2, 3)))
IDENTITY = Raw("identity")


def whole_numbers(numel: int) -> list[torch.Tensor]:
    """Sums and means of these are exact in float32, in whatever order."""
    index = torch.arange(numel)
    return [((index * 7919 + rank * 104729) % 1000 * 4 - 2000).float() for rank in range(WORLD)]


def compiled(
    route: Route, sizes: Sequence[int], codec: MessageCodec = IDENTITY, topology: Topology = PAIRS, **how: Any
) -> Program:
    names, how = [f"t{i}" for i in range(len(sizes))], {"dtype": torch.float32} | how
    return compile_route(codec.text, route, names, sizes, topology=topology, codes_sums=codec.codes_sums, **how)


def interpreted(program: Program, gradients: list[list[torch.Tensor]], codec: MessageCodec = IDENTITY) -> list[Any]:
    ranks = range(program.world)
    messages = [Message(program.names, program.dtype, rank, program.world) for rank in ranks]
    return Interpreter(program, codec, messages).run(gradients)


def check_mean(routes: list[Route], sizes: Sequence[int]) -> None:
    """Every route gives every rank the mean of whole numbers, which is exact in whatever order they are added."""
    gradients = [list(x.split_with_sizes(list(sizes))) for x in whole_numbers(sum(sizes))]
    means = [torch.stack(of_tensor).sum(0) / WORLD for of_tensor in zip(*gradients)]
    for route in routes:
        for result in interpreted(compiled(route, sizes), gradients):
            assert all(torch.equal(a, b) for a, b in zip(result, means)), str(route)


@pytest.mark.parametrize("sizes", [[0], [1], [3, 0, 1], [600, 41, 1, 0, 1200]])
def test_every_gpu_route_gives_the_mean(sizes: list[int]) -> None:
    check_mean(tree(("gpu",)), sizes)


def test_every_route_gives_the_mean() -> None:
    check_mean(tree(), [700, 3, 0, 1])


@pytest.mark.parametrize("name", sorted(NAMED))
def test_named_routes_give_the_mean(name: str) -> None:
    check_mean([NAMED[name]], [600, 41, 1, 0, 1200])


# --- Order of sums, and encodes --------------------------------------------------------------------------------------

# Rings add in another order on each part: a tensor of this size and name is dealt out in four equal ones, in order.
EVEN = 128 * WORLD * 2
FIRST = next(name for name in map(str, itertools.count()) if name_hash(name) % WORLD == 0)
ROUTES = [*NAMED.values(), *tree(("gpu",))]


def in_order(route: Route, xs: list[torch.Tensor]) -> torch.Tensor:
    """The mean, added up in the order of ranks: first on each host, or round the ring from behind a part's owner."""
    kinds = [step.kind for step in route.steps]
    inter = next((i for i, step in enumerate(route.steps) if step.where == "inter"), 0)
    if route.hierarchical and (kinds[0] != "enc" or "dec" in kinds[:inter]):  # else one decode adds up all
        return ((xs[0] + xs[1]) + (xs[2] + xs[3])) / WORLD
    if "ring" not in kinds:
        return (xs[0] + xs[1] + xs[2] + xs[3]) / WORLD
    parts = [x.split(EVEN // WORLD) for x in xs]
    rounds = [[parts[(owner + 1 + i) % WORLD][owner] for i in range(WORLD)] for owner in range(WORLD)]
    return torch.cat([a + b + c + d for a, b, c, d in rounds]) / WORLD


@pytest.mark.parametrize("route", ROUTES, ids=str)
def test_sums_are_formed_in_the_order_of_ranks(route: Route) -> None:
    inputs = [gradient(EVEN, seed=rank) for rank in range(WORLD)]
    expected = in_order(route, inputs)
    program = compile_route(IDENTITY.text, route, [FIRST], [EVEN], torch.float32, PAIRS)
    for (result,) in interpreted(program, [[x] for x in inputs]):
        assert same_bits(expected, result)


class AddsOne(Raw):
    """Every encode adds 1 to the values: results show where, and how often, they were encoded. Takes note of each."""

    def __init__(self) -> None:
        super().__init__("adds-one")
        self.seen: list[tuple[int, int, Hop]] = []

    def coder(self, message: Message) -> Coder:
        plain, seen = super().coder(message), self.seen

        class Adding(type(plain)):  # type: ignore[misc]
            recode = Coder.recode  # decodes and encodes

            def encode(self, table: Table, owners: Any, values: Values, hop: Hop, out: Any) -> list[int]:
                seen.append((self.message.rank, len(owners), hop))
                sizes: list[int] = super().encode(table, owners, values, hop, out)
                for frame, size in zip(out, sizes):
                    frame[:size].view(self._kind(hop)).add_(1)
                return sizes

        plain.__class__ = Adding
        return plain


# What such encodes add to a sum over all ranks, by ROUTES in their order, as hexadecimal digits: each adds 1 where it
# encodes a gradient for another rank or a sum, and WORLD where it encodes a mean.
ADDED = (
    "07748552004044437448040444804448226226155592262666a040444804448226226155592262666a262666a266"
    "6a4484483777b4484888c4484483777b4484888c484888c4888c66a66a5999d66a6aaae4484484888c4484888c"
)


@pytest.mark.parametrize(("route", "added"), list(zip(ROUTES, ADDED, strict=True)), ids=str)
def test_values_are_encoded_where_the_route_says(route: Route, added: str) -> None:
    inputs = [x[:EVEN] for x in whole_numbers(EVEN)]
    codec = AddsOne()
    expected = (torch.stack(inputs).sum(0) + int(added, 16)) / WORLD
    for (result,) in interpreted(compiled(route, [EVEN], codec), [[x] for x in inputs], codec):
        assert torch.equal(expected, result), str(route)
    rings = sum(step.kind == "ring" for step in route.steps)
    assert len({hop.number for _, _, hop in codec.seen}) == route.encodes + rings
    assert all(hop.own == (hop.summed == 1) for _, _, hop in codec.seen)


def test_an_all_to_all_encodes_every_rank_s_gradients_for_every_other_owner_and_then_the_sums() -> None:
    codec = AddsOne()
    interpreted(compiled(NAMED["alltoall"], [EVEN], codec), [[x] for x in whole_numbers(EVEN)], codec)
    own, sums = Hop(0, 1, True, False), Hop(1, WORLD, False, False)
    others, ranks = WORLD - 1, range(WORLD)
    assert codec.seen == [*((rank, others, own) for rank in ranks), *((rank, 1, sums) for rank in ranks)]


# --- Two kinds of division, and 16 bits ------------------------------------------------------------------------------


class Sums(AddsOne):
    codes_sums = True


def test_codecs_of_sums_divide_after_the_last_decode() -> None:
    inputs = whole_numbers(EVEN)
    mean = torch.stack(inputs).sum(0) / WORLD
    coded_means, coded_sums = AddsOne(), Sums()
    route = NAMED["alltoall"]
    (means,) = interpreted(compiled(route, [EVEN], coded_means), [[x] for x in inputs], coded_means)[0]
    (sums,) = interpreted(compiled(route, [EVEN], coded_sums), [[x] for x in inputs], coded_sums)[0]
    assert torch.equal(means, mean + (WORLD - 1) / WORLD + 1)
    assert torch.equal(sums, mean + (WORLD - 1) / WORLD + 1 / WORLD)
    assert [hop.wide for _, _, hop in coded_sums.seen if not hop.own] == [True] * WORLD


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", sorted(NAMED))
def test_sums_of_16_bits_are_formed_in_float32(name: str, dtype: torch.dtype) -> None:
    inputs = [gradient(EVEN, seed=rank, dtype=dtype) for rank in range(WORLD)]
    total = inputs[0].float()
    for x in inputs[1:]:
        total = total + x.float()
    results = interpreted(compiled(NAMED[name], [EVEN], dtype=dtype), [[x] for x in inputs])
    for (result,) in results:
        assert result.dtype == dtype
        if "hierarchical" in name or name == "ring":  # another order of sums
            assert torch.allclose(result.float(), total / WORLD, rtol=1e-2, atol=1e-6)
        else:
            assert same_bits(result, (total / WORLD).to(dtype))


@pytest.mark.parametrize("to", [torch.bfloat16, torch.float16])
def test_cast_rounds_what_is_sent_and_the_mean(to: torch.dtype) -> None:
    inputs = [gradient(EVEN, seed=rank) for rank in range(WORLD)]
    codec = Raw("cast", to)
    program = compiled(NAMED["alltoall"], [EVEN], codec)
    results = interpreted(program, [[x] for x in inputs], codec)
    table = Table.of(program.names, program.sizes, [WORLD])
    for part in table.parts:
        at = slice(part.start, part.stop)
        terms = [x[at] if rank == part.owner else x[at].to(to).float() for rank, x in enumerate(inputs)]
        mean = ((terms[0] + terms[1] + terms[2] + terms[3]) / WORLD).to(to).float()
        for (result,) in results:
            assert same_bits(result[at], mean)


# --- Programs as data ------------------------------------------------------------------------------------------------


def test_all_routes_compile_to_different_programs() -> None:
    programs = [compiled(route, [1000, 3]) for route in tree()]
    assert len({program.digest for program in programs}) == len(programs) == 4341
    for program in programs:
        assert program.steps[-1].target == VALUES
        written = {VALUES} | {step.target for step in program.steps}
        assert {buffer.name for buffer in program.buffers} == written
        assert isinstance(program.route, Route)
        coding = [step for step in program.steps if isinstance(step, Encode | Recode)]
        assert len(coding) == program.route.encodes


def test_text_form() -> None:
    assert str(compiled(NAMED["alltoall"], [1000, 3])).splitlines() == [
        "identity by enc.cpu > a2a.flat > dec.cpu > enc.cpu > ag.flat > dec.cpu: "
        "2 tensors, 1003 x float32, hosts 0,1 2,3",
        "  Encode.cpu own values -> frames1",
        "  AllToAll.flat frames1 -> frames2",
        "  Recode.cpu sum of 4 and values, divide frames2 -> frames4",
        "  AllGather.flat frames4 -> frames5",
        "  Decode.cpu frames5 -> values",
    ]


def test_digests_tell_programs_apart() -> None:
    route = NAMED["alltoall"]
    programs = [
        compiled(route, [1000, 3]),
        compiled(route, [1000, 4]),
        compiled(route, [1000, 3], dtype=torch.bfloat16),
        compiled(route, [1000, 3], Raw("cast", torch.bfloat16)),
        compiled(route, [1000, 3], topology=Topology(0, ((0,), (1,), (2,), (3,)))),
        compiled(NAMED["allgather"], [1000, 3]),
    ]
    assert len({program.digest for program in programs}) == len(programs)
    assert compiled(route, [1000, 3], topology=Topology(3, PAIRS.hosts)).digest == programs[0].digest, "on all ranks"


def test_buffers_have_the_size_of_what_they_hold() -> None:
    program = compiled(NAMED["alltoall"], [5120, 3])

    def bound(table: Table, owner: int, wide: bool) -> int:
        return IDENTITY.bound(table, owner, torch.float32)

    sizes = [{b.name: program.size(rank, b, bound) for b in program.buffers} for rank in range(WORLD)]
    owned = [1280 + 3 * (program.table(0, program.buffer("frames1")).numel(rank) > 1280) for rank in range(WORLD)]
    for rank in range(WORLD):
        assert sizes[rank]["values"] == sizes[rank]["frames1"] == sizes[rank]["frames5"] == 4 * 5123
        assert sizes[rank]["frames2"] == 4 * 4 * owned[rank], "one frame from each rank"
        assert sizes[rank]["frames4"] == 4 * owned[rank]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("route", ROUTES, ids=str)
def test_lowered_programs_give_the_same_bits(route: Route, dtype: torch.dtype) -> None:
    sizes = [EVEN, 3, 700, 0, 1]
    gradients = [[gradient(n, seed=rank + i, dtype=dtype) for i, n in enumerate(sizes)] for rank in range(WORLD)]
    program = compiled(route, sizes, dtype=dtype)
    flat = lowered(program)
    plain = {buffer.name for buffer in flat.buffers if not buffer.coded}
    assert not any(step.source in plain for step in flat.steps if isinstance(step, Communicate))
    for expected, result in zip(interpreted(program, gradients), interpreted(flat, gradients)):
        assert all(same_bits(a, b) for a, b in zip(expected, result))


@pytest.mark.parametrize("name", ["alltoall", "allgather", "ring", "gather", "allreduce", "hierarchical"])
def test_chunks_of_a_program_give_the_bits_of_the_whole(name: str) -> None:
    sizes = [70_000, 3, 700, 0, 90_001]
    gradients = [[gradient(n, seed=rank + i) for i, n in enumerate(sizes)] for rank in range(WORLD)]
    program = compiled(NAMED[name], sizes)
    chunks = program.chunked(10_000)
    assert len(chunks) == (1 if name == "hierarchical" else 4)
    assert len({chunk.digest for chunk in chunks}) == len(chunks)
    whole = interpreted(program, gradients)
    joined = [[torch.full_like(x, torch.nan) for x in of_rank] for of_rank in gradients]
    for chunk in chunks:
        for rank, result in enumerate(interpreted(chunk, gradients)):
            for part in chunk.table(rank, chunk.buffer(VALUES)).parts:
                joined[rank][part.tensor][part.start : part.stop] = result[part.tensor][part.start : part.stop]
    for a, b in zip(whole, joined):
        assert all(same_bits(x, y) for x, y in zip(a, b))


def test_uneven_hosts_take_flat_routes_alone() -> None:
    uneven = Topology(0, ((0, 1), (2,)))
    check = compiled(NAMED["alltoall"], [600], topology=uneven)
    inputs = whole_numbers(600)[:3]
    for (result,) in interpreted(check, [[3 * x] for x in inputs]):
        assert torch.equal(result, torch.stack(inputs).sum(0))
    with pytest.raises(Unsupported, match="equally many ranks"):
        compiled(NAMED["hierarchical"], [600], topology=uneven)
