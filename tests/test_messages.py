"""Codecs of one round in whole messages: the interpreter's results, residuals and codec state, on every engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from conftest import floor_for, gradient, same_bits
from engine_cases import native_on

from gradzip import engines, parse
from gradzip.engines import native
from gradzip.engines.layout import Floor
from gradzip.exchange.codecs import message_codec
from gradzip.exchange.coding import Message
from gradzip.exchange.compiler import compile_route
from gradzip.exchange.interpreter import Interpreter
from gradzip.exchange.program import Program
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
