"""The host runner with values on a device: the interpreter's bits, whatever is late, and no buffer used too long."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

import emulated
import fake_gpu
import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import gradient, same_bits
from ranks import run_ranks
from test_on_host import connect
from training import same, start

from gradzip.codecs import books, parse
from gradzip.engines.layout import Floor
from gradzip.errors import CodecError
from gradzip.exchange.coding import Message, Values
from gradzip.exchange.compiler import compile_route
from gradzip.exchange.interpreter import Interpreter
from gradzip.exchange.message_codecs import codes_messages
from gradzip.exchange.on_host import streams
from gradzip.exchange.on_host.gcomp_from_device import GCompDeviceCoder
from gradzip.exchange.on_host.runner import HostProgram, runner_of
from gradzip.exchange.outcome import Outcome
from gradzip.exchange.parts import Table
from gradzip.exchange.peers.channel import Channel
from gradzip.exchange.program import Hop
from gradzip.exchange.topology import Topology
from gradzip.feedback import Memory
from gradzip.routes import NAMED, Route

pytestmark = pytest.mark.skipif(emulated.COMPILER is None, reason="needs g++")
SIZES = [3, 5000, 0, 1, 700, 9001, *(130 + i for i in range(8))]
NAMES = [f"t{i}" for i in range(len(SIZES))]
STEPS = 3  # what is lost is added in the second, and its memory is used again in the third
WHOLE, CUT = [0, len(SIZES)], [0, 2, 6, len(SIZES)]  # in one message, or in several, as DDP's buckets have it
Case = tuple[str, str, torch.dtype]


def drawn(step: int, rank: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [gradient(n, 1000 * step + 100 * rank + i, dtype) for i, n in enumerate(SIZES)]


def floors_for(codec: str, first: int, last: int) -> list[Any]:
    """Where the codec asks for some: grids that keep part of each value."""
    if getattr(parse(codec), "mode", "") != "near":
        return []
    return [Floor(gradient(n, 5) * 0.1, gradient(n, 6).square() * 1e-8, -150, -75, -4) for n in SIZES[first:last]]


def message_of(
    codec: str, cut: tuple[int, int], rank: int, world: int, step: int, memory: Memory, **how: Any
) -> Message:
    first, last = cut
    grids = [floor.to(torch.device(how.get("device", "cpu"))) for floor in floors_for(codec, first, last)]
    return Message(NAMES[first:last], how["dtype"], rank, world, step, memory=memory, floors=grids)


class Interpreted:
    """All ranks in one process, with what they remember."""

    def __init__(self, codec: str, route: str, topology: Any, dtype: torch.dtype) -> None:
        self.codec, self.dtype, self.world = codec, dtype, topology_size(topology)
        self.memories = [Memory(rank) for rank in range(self.world)]
        self.whole = codes_messages(parse(codec), route, on_device=True)
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


def expected_of(cases: Sequence[Case], world: int, per_host: int, steps: int = STEPS) -> list[list[torch.Tensor]]:
    """The means of each case, step and tensor behind each other, with an engine of the CPU; all ranks get the same."""
    topology = Topology(0, tuple(zip(*[iter(range(world))] * per_host)))
    found = []
    for codec, route, dtype in cases:
        interpreted, means = Interpreted(codec, route, topology, dtype), []
        for step in range(steps):
            first, *others = [torch.cat(of_rank) for of_rank in interpreted.step(step)]
            assert all(same_bits(first, other) for other in others)
            means.append(first)
        found.append(means)
    return found


def exchanged(
    rank: int,
    cases: Sequence[Case],
    expected: Sequence[Sequence[torch.Tensor]],
    per_host: int,
    chunk: int,
    device: str = "cpu",
) -> dict[str, Any]:
    """What differs from the interpreter."""
    if device == "cuda":
        del os.environ["GRADZIP_ENGINE"]  # the right one for each device
    channel, world = connect(per_host, device), dist.get_world_size()
    if device == "cpu":
        fake_gpu.install()
    wrong = []
    for (codec, route, dtype), means in zip(cases, expected):
        whole = codes_messages(parse(codec), route, on_device=True)
        assert whole is not None
        for cuts in (WHOLE, CUT):
            memory, kept = Memory(rank), [torch.empty(n, dtype=dtype, device=device) for n in SIZES]
            parts = []
            for cut in itertools.pairwise(cuts):
                sizes, names = SIZES[slice(*cut)], NAMES[slice(*cut)]
                args = whole.text, Route.parse(route), names, sizes, dtype, channel.topology, whole.codes_sums
                program = HostProgram(compile_route(*args), whole, chunk, None, chunk // 2)
                parts.append((cut, program, Values(kept[slice(*cut)])))
            for step in range(len(means) if cuts is WHOLE or device == "cuda" else 2):
                torch._foreach_copy_(kept, drawn(step, rank, dtype))
                outcomes = SimpleQueue[Outcome]()
                ready = ready_on(device)
                for cut, program, values in parts:
                    message = message_of(codec, cut, rank, world, step, memory, dtype=dtype, device=device)
                    runner_of(channel).submit(program, values, message, outcomes.put, ready=ready)
                for _ in parts:
                    error = outcomes.get(timeout=120).error
                    if error is not None:
                        raise error
                memory.commit()
                found, wanted = [x.cpu() for x in kept], means[step].split_with_sizes(SIZES)
                for stream in fake_gpu.made:
                    assert not stream.holds(), "what a chunk brought or kept is let go with it"
                if not all(map(same_bits, found, wanted)):
                    which = [n for n, a, b in zip(NAMES, found, wanted) if not same_bits(a, b)]
                    wrong.append(f"{codec} by {route}, {dtype}, {cuts}, step {step}: {which[:4]}")
    return {"wrong": wrong, "overwritten": fake_gpu.overwritten}


def check(world: int, codecs: Sequence[str], routes: Sequence[str], *, dtype: torch.dtype = torch.float32) -> None:
    cases, per_host = [(codec, route, dtype) for codec in codecs for route in routes], 2 if world == 4 else 1
    expected = expected_of(cases, world, per_host)
    for found in run_ranks(world, exchanged, cases, expected, per_host, 2000, deadline=1500):
        assert found["wrong"] == []
        assert found["overwritten"] == []


def on_gpu(name: str) -> str:
    return str(NAMED[name].on("gpu"))


GPU_ALL_TO_ALL = on_gpu("alltoall")
GENERIC = ["identity", "cast", "topk:ratio=0.1", "sign", "qsgd:bits=4", "zlib", "threshold:value=0.5", "int8"]
GCOMP = ["gcomp:mode=lossless", "gcomp:keep=7", "gcomp:keep=3", "gcomp:mode=near", "gcomp:mode=lossless,book=shared"]


@pytest.mark.timeout(1600)
@pytest.mark.parametrize("codec", GCOMP)
def test_gcomp_has_the_bits_of_the_interpreter(codec: str) -> None:
    check(3, [codec], [GPU_ALL_TO_ALL])


@pytest.mark.timeout(1600)
def test_near_mode_with_residuals_and_own_gradients_lossless_has_them_too() -> None:
    check(2, ["gcomp:ulps=4096", "gcomp:own=lossless"], [GPU_ALL_TO_ALL])


@pytest.mark.timeout(1600)
def test_other_codecs_have_them_too() -> None:
    check(2, GENERIC, [GPU_ALL_TO_ALL])


@pytest.mark.timeout(1600)
def test_gradients_of_16_bits_have_them_too() -> None:
    check(2, ["gcomp:mode=lossless", "identity", "zlib"], [GPU_ALL_TO_ALL], dtype=torch.bfloat16)


@pytest.mark.timeout(1600)
def test_routes_have_them_too() -> None:
    """With sums on the way, rings, and plain values."""
    check(4, ["gcomp:keep=7"], list(map(on_gpu, ("ring", "allgather", "hierarchical"))))
    check(4, ["identity"], ["allreduce"])


@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_other_routes_have_them_too() -> None:
    check(4, ["gcomp:keep=3"], list(map(on_gpu, ("gather", "hierarchical_ring", "hierarchical_allgather"))))


@pytest.mark.timeout(1600)
def test_routes_that_code_on_the_cpu_have_them_too() -> None:
    check(2, ["gcomp:keep=3", "gcomp:mode=near", "topk:ratio=0.1"], [str(NAMED["alltoall"].on("cpu"))])


# --- By attach -------------------------------------------------------------------------------------------------------


def attached(rank: int, policies: Sequence[str]) -> dict[str, bool]:
    """The same training with and without the stand-in, where DDP makes several buckets."""
    means: dict[str, Any] = {}
    for policy in policies:
        run = start(policy)
        run.train(0, 4)
        means[policy] = run.parameters()
    fake_gpu.install()
    found = {}
    for policy in policies:
        run = start(policy)
        run.train(0, 4)
        found[policy] = same(run.parameters(), means[policy])
        assert run.handle is not None
        assert run.handle.stats()["runner"] == "host"
    assert fake_gpu.overwritten == []
    return found


@pytest.mark.timeout(1600)
def test_attach_trains_as_without_a_device() -> None:
    policies = ["gcomp", "gcomp:keep=3", "gcomp:mode=lossless,book=shared,refresh=3", "topk:ratio=0.1"]
    for found in run_ranks(2, attached, policies, deadline=1500):
        assert found == dict.fromkeys(policies, True)


# --- What fails ------------------------------------------------------------------------------------------------------


def on(device: str) -> Channel:
    """A channel for values on a GPU, or on what stands in for it."""
    if device == "cuda":
        del os.environ["GRADZIP_ENGINE"]  # the right one for each device
    else:
        fake_gpu.install()
    return connect(1, device)


def ready_on(device: str) -> streams.Mark:
    """When all that was enqueued so far is done."""
    return torch.cuda.current_stream().record_event() if device == "cuda" else None


def damaged(rank: int, route: str, device: str = "cpu") -> str:
    """Rank 1 damages what it sends first, behind the headers, which only the device looks at."""
    channel, way = on(device), Route.parse(route)
    whole = codes_messages(parse("gcomp:mode=lossless"), route, on_device=True)
    assert whole is not None
    program = compile_route(whole.text, way, ["x"], [40_000], torch.float32, channel.topology, whole.codes_sums)
    send, sent = channel.gloo.send, itertools.count()

    def spoilt(parts: Any, into: Any, tag: int) -> Any:
        if rank == 1 and next(sent) == 0:
            parts = [(to, data.clone()) for to, data in parts]  # what it keeps is sound
            for _, data in parts:
                data[100:140] ^= 0x55
        return send(parts, into, tag)

    channel.gloo.send = spoilt  # type: ignore[method-assign]
    outcomes = SimpleQueue[Outcome]()
    message, values = Message(["x"], torch.float32, rank, 2), Values([gradient(40_000, rank).to(device)])
    prepared = HostProgram(program, whole)
    runner_of(channel).submit(prepared, values, message, outcomes.put, ready=ready_on(device))
    return str(outcomes.get(timeout=120).error)


DECODED = [GPU_ALL_TO_ALL, "enc.gpu > a2a.flat > dec.gpu > ag.flat", on_gpu("allgather")]


def check_damaged(route: str, device: str) -> None:
    first, second = run_ranks(2, damaged, route, device, deadline=1500)
    others = set() if route == on_gpu("allgather") else {second}  # there rank 1 waits for nothing more
    for said in {first} | others:
        assert "rank 1 sent a frame of gcomp:mode=lossless" in said
        assert "damaged" in said


@pytest.mark.timeout(1600)
@pytest.mark.parametrize("route", DECODED)
def test_a_damaged_body_names_the_rank_that_sent_it(route: str) -> None:
    """Whatever follows: an encode, values as they are, or nothing."""
    check_damaged(route, "cpu")


def refused(rank: int, codec: str) -> list[str]:
    """Flips each bit of a frame that the host looks at; what was not noticed."""
    fake_gpu.install()
    whole = codes_messages(parse(codec), GPU_ALL_TO_ALL, on_device=True)
    assert whole is not None
    lengths = torch.tensor([*range(1, 9), *[0] * 248], dtype=torch.uint8)  # the escape has 8 bits
    book = next(b for n in range(248) if (b := books.of_lengths(lengths.roll(n))).id >> 31)  # as large as ids can be
    sizes, values = [5000, 9000], [gradient(n, n) for n in (5000, 9000)]
    table = Table.of(["x", "y"], sizes, [1])
    found = []
    with fake_gpu.LateStream(torch.device("cpu")) as stream:
        coder = whole.coder(Message(["x", "y"], torch.float32, book=book))
        assert isinstance(coder, GCompDeviceCoder)
        coder.measure(Values(values))
        room = torch.zeros(whole.bound(table, 0, torch.float32), dtype=torch.uint8)
        (size,) = coder.encode(table, [0], Values(values), Hop(0, 1, True, False), [room])
        stream.wait()
        frame, numels = room[:size], np.array(sizes)
        first = 16 + int(frame[:8].view(torch.int64)) + -int(frame[:8].view(torch.int64)) % 8
        assert coder._bodies(frame, numels).sizes.tolist() == (frame[:16].view(torch.int64) - 24).tolist()
        for at in (*range(16 + 32), *range(first, first + 32)):
            for bit in range(8):
                bad = frame.clone()
                bad[at] ^= 1 << bit
                try:
                    coder._bodies(bad, numels)
                    found.append(f"bit {bit} of byte {at}")
                except CodecError:
                    pass
    return found


@pytest.mark.timeout(1600)
@pytest.mark.parametrize("codec", ["gcomp:mode=lossless", "gcomp:mode=lossless,book=shared"])
def test_the_host_notices_every_bit_that_is_wrong_in_a_header(codec: str) -> None:
    assert run_ranks(1, refused, codec, deadline=1500) == [[]]


# --- What others do meanwhile ----------------------------------------------------------------------------------------


def overwritten_early(rank: int, device: str = "cpu") -> dict[str, bool]:
    """Whoever gets the means may change them while the host still waits for the device: a step may be over by then."""
    channel, route, sizes = on(device), Route.parse(GPU_ALL_TO_ALL), [40_000, 3]
    finite = {}
    for codec in ("gcomp:mode=lossless", "identity", "topk:ratio=0.1"):
        whole = codes_messages(parse(codec), GPU_ALL_TO_ALL, on_device=True)
        assert whole is not None
        program = compile_route(whole.text, route, ["x", "y"], sizes, torch.float32, channel.topology, whole.codes_sums)
        for first, then in ((float("nan"), 0.0), (0.0, float("nan"))):
            values = [gradient(n, rank).to(device) for n in sizes]
            if rank == 1:
                values[0][20_000] += first

            def enqueued(values: list[torch.Tensor] = values, then: float = then) -> None:
                for x in values:
                    x.fill_(then)

            outcomes = SimpleQueue[Outcome]()
            message = Message(["x", "y"], torch.float32, rank, 2, memory=Memory(rank))
            args = HostProgram(program, whole, 4000), Values(values), message, outcomes.put
            runner_of(channel).submit(*args, ready=ready_on(device), enqueued=enqueued)
            outcome = outcomes.get(timeout=120)
            assert outcome.error is None
            finite[f"{codec}, {first}"] = outcome.finite
    return finite


def check_finite(device: str) -> None:
    for found in run_ranks(2, overwritten_early, device, deadline=1500):
        assert found == {case: "nan" not in case for case in found}


@pytest.mark.timeout(1600)
def test_whether_means_are_finite_is_asked_before_ddp_goes_on() -> None:
    check_finite("cpu")


def test_what_landed_is_not_taken_for_a_later_frame_at_the_same_place() -> None:
    stream, frame = fake_gpu.LateStream(torch.device("cpu")), torch.zeros(100, dtype=torch.uint8)
    stream.land(frame)  # and passed on to another rank
    stream.forget()
    frame.fill_(7)
    assert torch.equal(stream.there(frame), frame)
