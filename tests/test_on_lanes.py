"""The host runner with values on a device: the interpreter's bits, whatever is late, and no buffer used too long."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import emulated
import lanes_standin
import pytest
import torch
import torch.distributed as dist
from conftest import gradient, same_bits
from emulated import floors
from ranks import run_ranks
from test_on_host import connect

from gradzip.codecs import parse
from gradzip.exchange.codecs import message_codec
from gradzip.exchange.coding import Message, Values
from gradzip.exchange.compiler import compile_route
from gradzip.exchange.interpreter import Interpreter
from gradzip.exchange.on_host import HostProgram, runner_of
from gradzip.exchange.outcome import Outcome
from gradzip.feedback import Memory
from gradzip.routes import NAMED, Route

pytestmark = pytest.mark.skipif(emulated.COMPILER is None, reason="needs g++")
SIZES = [3, 5000, 0, 1, 700, 9001, *(130 + i for i in range(20))]
NAMES = [f"t{i}" for i in range(len(SIZES))]
STEPS = 3


def drawn(step: int, rank: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [gradient(n, 1000 * step + 100 * rank + i, dtype) for i, n in enumerate(SIZES)]


def floors_for(codec: str, first: int, last: int) -> list[Any]:
    return [floors(n, "both") for n in SIZES[first:last]] if parse(codec).name == "gcomp" and "near" in codec else []


def message_of(
    codec: str, cut: tuple[int, int], rank: int, world: int, step: int, memory: Memory, **how: Any
) -> Message:
    first, last = cut
    return Message(
        NAMES[first:last], how["dtype"], rank, world, step, memory=memory, floors=floors_for(codec, first, last)
    )


class Interpreted:
    """All ranks in one process, with what they remember."""

    def __init__(self, codec: str, route: str, topology: Any, dtype: torch.dtype) -> None:
        self.codec, self.dtype, self.world = codec, dtype, topology_size(topology)
        self.memories = [Memory(rank) for rank in range(self.world)]
        self.whole = message_codec(parse(codec))
        assert self.whole is not None
        args = self.whole.text, Route.parse(route), NAMES, SIZES, dtype, topology, self.whole.codes_sums
        self.program = compile_route(*args)

    def step(self, step: int) -> list[list[torch.Tensor]]:
        everybody = [drawn(step, rank, self.dtype) for rank in range(self.world)]
        messages = [
            message_of(self.codec, (0, len(SIZES)), rank, self.world, step, self.memories[rank], dtype=self.dtype)
            for rank in range(self.world)
        ]
        assert self.whole is not None
        means = Interpreter(self.program, self.whole, messages).run(everybody)
        for memory in self.memories:
            memory.commit()
        return means


def topology_size(topology: Any) -> int:
    return sum(map(len, topology.hosts))


def exchanged(rank: int, cases: Sequence[tuple[str, str, torch.dtype]], per_host: int, chunk: int) -> dict[str, Any]:
    """What differs from the interpreter, which goes first: it has the engines of the CPU."""
    channel, world, expected = connect(per_host), dist.get_world_size(), []
    for codec, route, dtype in cases:
        interpreted = Interpreted(codec, route, channel.topology, dtype)
        expected.append([interpreted.step(step)[rank] for step in range(STEPS)])
    lanes_standin.install()
    wrong = []
    for (codec, route, dtype), means in zip(cases, expected):
        whole = message_codec(parse(codec))
        assert whole is not None
        for cuts in ([0, len(SIZES)], [0, 2, 6, len(SIZES)]):
            memory, kept = Memory(rank), [torch.empty(n, dtype=dtype) for n in SIZES]
            parts = []
            for cut in itertools.pairwise(cuts):
                sizes, names = SIZES[slice(*cut)], NAMES[slice(*cut)]
                args = whole.text, Route.parse(route), names, sizes, dtype, channel.topology, whole.codes_sums
                parts.append((cut, HostProgram(compile_route(*args), whole, chunk), Values(kept[slice(*cut)])))
            for step in range(STEPS):
                torch._foreach_copy_(kept, drawn(step, rank, dtype))
                outcomes = list[Outcome]()
                for cut, program, values in parts:
                    message = message_of(codec, cut, rank, world, step, memory, dtype=dtype)
                    runner_of(channel).submit(program, values, message, outcomes.append)
                runner_of(channel).drain()
                for outcome in outcomes:
                    if outcome.error is not None:
                        raise outcome.error
                memory.commit()
                if not all(map(same_bits, kept, means[step])):
                    which = [n for n, a, b in zip(NAMES, kept, means[step]) if not same_bits(a, b)]
                    wrong.append(f"{codec} by {route}, {dtype}, {cuts}, step {step}: {which[:4]}")
    return {"wrong": wrong, "overwritten": lanes_standin.overwritten}


def check(world: int, codecs: Sequence[str], routes: Sequence[str], *, dtype: torch.dtype = torch.float32) -> None:
    cases = [(codec, route, dtype) for codec in codecs for route in routes]
    for found in run_ranks(world, exchanged, cases, 2 if world == 4 else 1, 2000, deadline=1500):
        assert found["wrong"] == []
        assert found["overwritten"] == []


GPU_ALL_TO_ALL = str(NAMED["alltoall"].on("gpu"))
GCOMP = ["gcomp:mode=lossless", "gcomp:keep=7", "gcomp:keep=3", "gcomp:mode=near", "gcomp:mode=lossless,book=shared"]


@pytest.mark.timeout(1600)
@pytest.mark.parametrize("codec", GCOMP)
def test_gcomp_has_the_bits_of_the_interpreter(codec: str) -> None:
    check(3, [codec], [GPU_ALL_TO_ALL])
