"""Every codec of the stream runner that is made of torch's operations: the host's bits, also of what it remembers."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import emulated
import pytest
import streams
import torch
import torch.distributed as dist
from conftest import gradient, same_bits
from ranks import run_ranks
from test_programs import compiled

from gradzip.codecs import parse
from gradzip.exchange import rounds
from gradzip.exchange.codecs import message_codec, stream_codec
from gradzip.exchange.coding import Message
from gradzip.exchange.interpreter import Interpreter, run_rounds
from gradzip.exchange.on_stream import StreamMessage, StreamRunner
from gradzip.exchange.topology import Topology
from gradzip.feedback import Memory
from gradzip.routes import NAMED
from gradzip.sensitivity.shape import SecondMoments

pytestmark = pytest.mark.skipif(emulated.COMPILER is None, reason="needs g++")
SIZES = [3, 3000, 1, 700, 9001, 33, 1200]
NAMES = [f"t{i}" for i in range(len(SIZES))]
CODED = [
    *("sign", "sign:feedback=false", "onebit", "terngrad", "terngrad:clip=2.5", "natural", "natural:bits=3"),
    *("qsgd", "qsgd:bits=5,bucket=64", "qsgd:bits=2,norm=l2,feedback=true"),
]
CODECS = [
    *CODED,
    *("randomk:ratio=0.1", "randomk:ratio=0.3,unbiased=true", "randomblock:ratio=0.1"),
    *("randomblock:ratio=0.3,unbiased=true,feedback=true", "topk:ratio=0.05", "topk:ratio=1.0", "topk:feedback=false"),
    *("cast:feedback=true", "cast:to=fp16,feedback=true"),
    *("int8:feedback=true", "int4:feedback=true", "fp8:feedback=true", "int4:block=128,hadamard=true,feedback=true"),
]
# What each step's gradients are multiplied by on rank 1, and the loss scale of all: an ordinary step is first, and two
# steps are not finite, one before and one after the device takes over from the host.
STEPS = [(1.0, 1.0), (torch.inf, 1.0), (1.0, 1.0), (1.0, 1024.0), (torch.nan, 1024.0), (1.0, 3.0), (1.0, 3.0)]


def given(world: int, step: int, dtype: torch.dtype) -> list[list[torch.Tensor]]:
    """Gradients of all ranks, which carry the loss scale."""
    factor, scale = STEPS[step]
    drawn = [[gradient(n, 100 * step + 10 * rank + i) * scale for i, n in enumerate(SIZES)] for rank in range(world)]
    drawn[1][1][7:9] *= factor
    return [[x.to(dtype) for x in of_rank] for of_rank in drawn]


class Host:
    """All ranks in one process, with what they remember."""

    def __init__(self, codec: str, route: str | None, world: int, dtype: torch.dtype) -> None:
        self.codec, self.route, self.world, self.dtype = parse(codec), route, world, dtype
        self.memories = [Memory(rank) for rank in range(world)]
        self.topology = Topology(0, tuple((rank,) for rank in range(world)))

    def step(self, step: int, gradients: list[list[torch.Tensor]], scale: float) -> list[torch.Tensor]:
        found = stream_codec(self.codec, self.route)
        assert found is not None
        by_frames = found.route == NAMED["allreduce"]
        mean = (self._rounds if by_frames else self._messages)(step, gradients, scale)
        for memory in self.memories:
            memory.commit() if all(bool(x.isfinite().all()) for x in mean) else memory.drop()
        return mean

    def _messages(self, step: int, gradients: list[list[torch.Tensor]], scale: float) -> list[torch.Tensor]:
        whole, found = message_codec(self.codec), stream_codec(self.codec, self.route)
        assert whole is not None
        assert found is not None
        program = compiled(found.route, SIZES, whole, self.topology, dtype=self.dtype)
        messages = [
            Message(program.names, self.dtype, rank, self.world, step, scale=scale, memory=self.memories[rank])
            for rank in range(self.world)
        ]
        return Interpreter(program, whole, messages).run([copy.deepcopy(each) for each in gradients])[0]

    def _rounds(self, step: int, gradients: list[list[torch.Tensor]], scale: float) -> list[torch.Tensor]:
        from gradzip.codecs import Context

        tensors = [copy.deepcopy(each) for each in gradients]
        contexts = [[Context(name, step, 0, r, self.world, scale) for name in NAMES] for r in range(self.world)]
        about = zip(tensors, contexts, self.memories)
        run_rounds([rounds.of(self.codec, *each, scale) for each in about], self.topology)
        return tensors[0]


class Streams:
    """This rank's stream runner; its buckets begin at `cuts`, and DDP makes others in the fourth step."""

    def __init__(self, codec: str, route: str | None, dtype: torch.dtype, cuts: list[int]) -> None:
        group = dist.group.WORLD
        assert group is not None
        made = stream_codec(parse(codec), route)
        assert made is not None
        self._text, self._codec, self._dtype = codec, made, dtype
        topology = Topology(dist.get_rank(), tuple((rank,) for rank in range(dist.get_world_size())))
        self.memory = Memory(dist.get_rank())
        self.runner = StreamRunner(group, torch.device("cpu"), topology, SecondMoments([], {}), self.memory)
        self.make(cuts)

    def make(self, cuts: list[int]) -> None:
        self._cuts, self._made = cuts, []
        for first, last in itertools.pairwise(cuts):
            buffer = torch.empty(sum(SIZES[first:last]), dtype=self._dtype)
            tensors = buffer.split_with_sizes(SIZES[first:last])
            self._made.append((buffer, StreamMessage(self._text, self._codec, NAMES[first:last], tensors)))

    def step(self, step: int, gradients: list[torch.Tensor], scale: float) -> list[torch.Tensor]:
        self.runner.begin(step, use_shapes=False, scale=scale)
        means = []
        for (first, last), (buffer, message) in zip(itertools.pairwise(self._cuts), self._made):
            torch._foreach_copy_(list(message.tensors), gradients[first:last])
            self.runner.take(buffer, [message], last == self._cuts[-1])
            means += [tensor.clone() for tensor in message.tensors]
        return means


def canonical(x: torch.Tensor) -> torch.Tensor:
    """NaNs of other bits are as good: which one survives an addition is up to the processor."""
    return torch.where(x.isnan(), torch.full_like(x, torch.nan), x)


def alike(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """The fields in which two states differ."""
    wrong = sorted(found.keys() ^ expected.keys())
    for key in found.keys() & expected.keys():
        a, b = (torch.as_tensor(state[key]) for state in (found, expected))
        if a.shape != b.shape or not (same_bits(a, b) if a.is_floating_point() else torch.equal(a, b)):
            wrong.append(key)
    return wrong


def compared(rank: int, codec: str, route: str | None) -> list[str]:
    streams.install()
    world, wrong = dist.get_world_size(), list[str]()
    for dtype, cuts in ((torch.float32, [0, 7]), (torch.bfloat16, [0, 1, 3, 7]), (torch.float16, [0, 4, 7])):
        host, mine = Host(codec, route, world, dtype), Streams(codec, route, dtype, cuts)
        for step, (_, scale) in enumerate(STEPS):
            gradients = given(world, step, dtype)
            expected, found = host.step(step, gradients, scale), mine.step(step, gradients[rank], scale)
            if not all(same_bits(canonical(a), canonical(b)) for a, b in zip(found, expected)):
                wrong.append(f"{dtype}: means of step {step}")
            if step in (1, 2, 4, 6):
                mine.runner.drain()
                state = host.memories[rank].state_dict()
                wrong += [f"{dtype}: {key} of step {step}" for key in alike(mine.memory.state_dict(), state)]
            if step == 3:
                mine.make(cuts)
        mine.runner.drain()
    return wrong


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize(
    ("codec", "route"), [*((codec, None) for codec in CODECS), *((codec, "alltoall") for codec in CODED)]
)
def test_means_and_residuals_are_those_of_the_interpreter(world: int, codec: str, route: str | None) -> None:
    for wrong in run_ranks(world, compared, codec, route):
        assert wrong == []
