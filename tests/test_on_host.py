"""The host runner gives the interpreter's bits, for every route and however messages are cut; and it never hangs."""

from __future__ import annotations

import functools
import itertools
import math
import os
import threading
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from conftest import floor_for, gradient, same_bits
from exchanges import covering
from ranks import TIMEOUT, run_ranks

from gradzip.codecs import REGISTRY, Codec, Context, parse
from gradzip.engines.layout import Floor
from gradzip.engines.noise_layout import Shapes
from gradzip.errors import PeerError, Unsupported
from gradzip.exchange import rounds
from gradzip.exchange.coding import Message, MessageCodec, Raw, Values
from gradzip.exchange.compiler import compile_route
from gradzip.exchange.interpreter import Interpreter, run_rounds
from gradzip.exchange.message_codecs import message_codec, route_of
from gradzip.exchange.on_host import runner as on_host
from gradzip.exchange.on_host.rounds import submit_rounds
from gradzip.exchange.on_host.runner import HostProgram, runner_of
from gradzip.exchange.outcome import Outcome
from gradzip.exchange.peers.channel import Channel, open_channel
from gradzip.feedback import Memory
from gradzip.routes import NAMED, Route, tree

FLAT = [name for name, route in NAMED.items() if not route.hierarchical]
SIZES = [3, 5000, 0, 1, 700, 40_001]
CODECS = {"identity": Raw("identity"), "cast": Raw("cast", torch.bfloat16)}


def connect(per_host: int, device: str = "cpu") -> Channel:
    os.environ["LOCAL_WORLD_SIZE"] = str(per_host)
    assert dist.group.WORLD is not None
    return open_channel(dist.group.WORLD, torch.device(device), timeout=TIMEOUT)


class Exchange:
    """Sends messages of named tensors through the runner, and through the interpreter beside it."""

    def __init__(self, channel: Channel) -> None:
        self.channel, self.step = channel, 0

    def prepared(
        self, codec: MessageCodec, route: Route, names: Sequence[str], sizes: Sequence[int], **how: object
    ) -> HostProgram:
        dtype = how.get("dtype", torch.float32)
        assert isinstance(dtype, torch.dtype)
        program = compile_route(codec.text, route, names, sizes, dtype, self.channel.topology, codec.codes_sums)
        return HostProgram(program, codec, chunk=2000)

    def run(
        self,
        messages: Sequence[tuple[HostProgram, list[torch.Tensor]]],
        shapes: Sequence[Sequence[torch.Tensor | None]] | None = None,
        memory: Memory | None = None,
        floors: Sequence[Floor] = (),
    ) -> Outcome:
        """Replaces tensors by their means; several messages at once."""
        outcomes, left = [Outcome()] * len(messages), threading.Semaphore(0)
        for number, (prepared, tensors) in enumerate(messages):

            def done(outcome: Outcome, number: int = number) -> None:
                outcomes[number] = outcome
                left.release()

            program = prepared.program
            message = Message(program.names, program.dtype, self.channel.rank, program.world, self.step)
            message.shapes, message.memory, message.floors = Shapes(shapes[number]) if shapes else None, memory, floors
            runner_of(self.channel).submit(prepared, Values(tensors), message, done)
        for _ in messages:
            assert left.acquire(timeout=60), "an exchange hangs"
        total = Outcome()
        for outcome in outcomes:
            total.add(outcome)
        self.step += 1
        if total.error is not None:
            raise total.error
        return total


def gradients_of(rank: int, sizes: Sequence[int], dtype: torch.dtype) -> list[torch.Tensor]:
    return [gradient(n, seed=100 * rank + i, dtype=dtype) for i, n in enumerate(sizes)]


def compare(rank: int, per_host: int, routes: list[str], codec: str, dtype: torch.dtype) -> list[str]:
    """Those routes by which the runner gives other bits than the interpreter."""
    exchange, world = Exchange(connect(per_host)), dist.get_world_size()
    names, wrong = [f"layer.{i}" for i in range(len(SIZES))], []
    everybody = [gradients_of(r, SIZES, dtype) for r in range(world)]
    for text in routes:
        prepared = exchange.prepared(CODECS[codec], Route.parse(text), names, SIZES, dtype=dtype)
        messages = [Message(names, dtype, r, world, exchange.step) for r in range(world)]
        expected = Interpreter(prepared.program, prepared.codec, messages).run(everybody)[rank]
        tensors = [x.clone() for x in everybody[rank]]
        exchange.run([(prepared, tensors)])
        if not all(same_bits(a, b) for a, b in zip(tensors, expected)):
            wrong.append(text)
    return wrong


@pytest.mark.parametrize(("world", "per_host"), [(2, 1), (3, 1), (3, 3), (4, 2)])
def test_runner_gives_the_bits_of_the_interpreter(world: int, per_host: int) -> None:
    routes = list(NAMED) if world == 4 else FLAT
    for codec, dtype in (("identity", torch.float32), ("cast", torch.float32), ("identity", torch.bfloat16)):
        assert run_ranks(world, compare, per_host, routes, codec, dtype) == [[]] * world


def test_runner_gives_the_bits_of_the_interpreter_by_routes_that_cover_the_tree() -> None:
    routes = list(map(str, covering(tree(("gpu",)))))
    assert run_ranks(4, compare, 2, routes, "cast", torch.float32) == [[]] * 4


@pytest.mark.slow
@pytest.mark.timeout(1900)
def test_runner_gives_the_bits_of_the_interpreter_by_every_route() -> None:
    assert run_ranks(4, compare, 2, list(map(str, tree())), "cast", torch.float32, deadline=1800) == [[]] * 4


# --- Where no rank owns a part, tensors are coded whole --------------------------------------------------------------

WHOLE = ["allgather", "gather"]
SMALL = [3, 1300, 0, 1, 700, 2, 9001, 1024, 1024, 1024, 40]  # some have fewer values than there are ranks
SPARSE = ["topk", "threshold:value=0.5", "dgc:ratio=0.02"]


def takes(codec: Codec, route: str) -> bool:
    try:
        return codec.rounds == 1 and route_of(codec, route) == route
    except Unsupported:
        return False


EVERY = [
    *(name for name in sorted(REGISTRY) if takes(parse(name), WHOLE[0])),
    *("cast:feedback=true", "qsgd:bits=4,bucket=100,feedback=true", "natural:bits=3", "gcomp:keep=3,feedback=true"),
    *("threshold:value=0.5", "topk:ratio=0.1,feedback=bf16", "randomk:ratio=0.1,unbiased=true"),
]


def whole_tensors(rank: int, codecs: list[str], dtype: torch.dtype) -> list[str]:
    """Means and memories that are other than the interpreter's, over steps that have something to remember."""
    exchange, world, wrong = Exchange(connect(1)), dist.get_world_size(), list[str]()
    names = [f"layer.{i}" for i in range(len(SMALL))]
    floors = [floor_for(torch.empty(size), seed) for seed, size in enumerate(SMALL)]
    for text, route in itertools.product(codecs, WHOLE):
        codec = message_codec(parse(text))
        assert codec is not None
        prepared = exchange.prepared(codec, NAMED[route], names, SMALL, dtype=dtype)
        mine, of_all = Memory(rank), [Memory(peer) for peer in range(world)]
        for step in range(2):
            everybody = [gradients_of(peer + 10 * step, SMALL, dtype) for peer in range(world)]
            messages = [
                Message(names, dtype, peer, world, exchange.step, memory=of_all[peer], floors=floors)
                for peer in range(world)
            ]
            expected = Interpreter(prepared.program, codec, messages).run(everybody)[rank]
            tensors = [x.clone() for x in everybody[rank]]
            exchange.run([(prepared, tensors)], memory=mine, floors=floors)
            for memory in (mine, *of_all):
                memory.commit()
            kept, by_all = mine.state_dict(), of_all[rank].state_dict()
            alike = kept.keys() == by_all.keys() and all(
                torch.equal(torch.as_tensor(kept[key]), torch.as_tensor(by_all[key])) for key in kept
            )
            if not alike or not all(same_bits(a, b) for a, b in zip(tensors, expected)):
                wrong.append(f"{text} by {route} in step {step}: {'means' if alike else 'memory'}")
            wrong += [f"{text} by {route}: {key}" for key in kept if "[" in key]  # of a part
    return wrong


@pytest.mark.parametrize("world", [2, 3, 4])
def test_tensors_that_nobody_owns_a_part_of_have_the_bits_of_the_interpreter(world: int) -> None:
    assert {"sign", "qsgd", "topk", "threshold", "dgc", "gcomp", "zlib"} <= set(EVERY)
    assert run_ranks(world, whole_tensors, EVERY, torch.float32) == [[]] * world


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tensors_of_16_bits_that_nobody_owns_a_part_of_have_the_bits_of_the_interpreter(dtype: torch.dtype) -> None:
    assert run_ranks(3, whole_tensors, EVERY, dtype) == [[]] * 3


def many_small(rank: int, codec: str) -> tuple[int, int]:
    """Bytes sent to each other rank for many small tensors, and those of their frames one by one."""
    exchange, count = Exchange(connect(1)), 200
    chosen, names, sizes = parse(codec), [f"layer.{i}" for i in range(count)], [1024] * count
    whole = message_codec(chosen)
    assert whole is not None
    tensors = gradients_of(rank, sizes, torch.float32)
    alone = [chosen.encode(x, Context(name, world=exchange.channel.world)) for name, x in zip(names, tensors)]
    outcome = exchange.run([(exchange.prepared(whole, NAMED["allgather"], names, sizes), tensors)], memory=Memory(rank))
    return outcome.bytes_sent // (exchange.channel.world - 1), sum(frame.numel() for frame in alone)


@pytest.mark.parametrize("codec", [*SPARSE, "sign", "qsgd"])
def test_many_small_tensors_send_what_their_frames_take(codec: str) -> None:
    for sent, alone in run_ranks(4, many_small, codec):
        assert alone < sent <= alone + 200 * (8 + 7) + 1000, "the size of each frame, what fills it up, a few headers"


def in_rounds(rank: int, codec: str) -> list[str]:
    """Tensors that are other than the interpreter's, after three steps of a codec that exchanges in rounds."""
    channel, wrong = connect(1), list[str]()
    names, shapes = ["m", "v", "n"], [(40, 30), (7,), (300, 50)]
    world = channel.world
    mine, of_all = Memory(rank), [Memory(peer) for peer in range(world)]
    chosen = parse(codec)

    def started(tensors: list[torch.Tensor], memory: Memory, peer: int, step: int) -> rounds.Rounds:
        states = [memory.state(name, chosen.name) for name in names]
        contexts = [Context(n, step, rank=peer, world=world, state=state) for n, state in zip(names, states)]
        return rounds.of(chosen, tensors, contexts, memory)

    for step in range(3):
        each = [
            [gradient(math.prod(shape), 100 * step + peer).view(shape) for shape in shapes] for peer in range(world)
        ]
        tensors, ended = [tensor.clone() for tensor in each[rank]], threading.Event()
        about = Message(names, torch.float32, rank, world, step)
        start = functools.partial(started, tensors, mine, rank, step)
        submit_rounds(runner_of(channel), codec, start, about, lambda outcome, ended=ended: ended.set())  # type: ignore[misc]
        run_rounds([started(each[peer], of_all[peer], peer, step) for peer in range(world)], channel.topology)
        assert ended.wait(TIMEOUT.total_seconds())
        for memory in (mine, *of_all):
            memory.commit()
        wrong += [f"{name} at step {step}" for name, a, b in zip(names, tensors, each[rank]) if not same_bits(a, b)]
    channel.leave()
    return wrong


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("codec", ["powersgd:rank=2", "powersgd:rank=1,alternate=true", "randomk:ratio=0.3"])
def test_rounds_give_the_bits_of_the_interpreter(world: int, codec: str) -> None:
    assert run_ranks(world, in_rounds, codec) == [[]] * world


def packings(rank: int, in_flight: int) -> dict[str, object]:
    """The same tensors in one message and in three, several messages under way at once."""
    on_host.IN_FLIGHT = in_flight
    exchange = Exchange(connect(1))
    names, mine = [f"layer.{i}" for i in range(len(SIZES))], gradients_of(rank, SIZES, torch.float32)
    results, sent = [], []
    for cuts in ([0, 6], [0, 1, 4, 6]):
        tensors = [x.clone() for x in mine]
        messages = []
        for first, last in itertools.pairwise(cuts):
            codec = CODECS["cast"]
            prepared = exchange.prepared(codec, NAMED["alltoall"], names[first:last], SIZES[first:last])
            messages.append((prepared, tensors[first:last]))
        sent.append(exchange.run(messages).bytes_sent)
        results.append(torch.cat(tensors))
    frames = 2 * sum(2 * n for n in SIZES) * (dist.get_world_size() - 1) / dist.get_world_size()
    return {"results": results, "sent": sent, "frames": frames}


@pytest.mark.parametrize("in_flight", [1, on_host.IN_FLIGHT])
def test_results_do_not_depend_on_how_tensors_are_put_into_messages(in_flight: int) -> None:
    found = run_ranks(4, packings, in_flight)
    for rank in found:
        assert same_bits(*rank["results"])
        assert same_bits(rank["results"][0], found[0]["results"][0]), "replicas are bit-identical"
    total = sum(rank["sent"][0] for rank in found)
    assert total == pytest.approx(sum(rank["frames"] for rank in found), rel=0.02), "16 bits a value, and exact bytes"


# --- What fails, fails on all ranks ----------------------------------------------------------------------------------


def one_leaves(rank: int) -> str:
    """A rank ends in the middle of training; the others are in an exchange with it."""
    exchange = Exchange(connect(1))
    prepared = exchange.prepared(CODECS["identity"], NAMED["alltoall"], ["x"], [400_000])
    for step in range(100):
        if rank == 2 and step == 3:
            return "left"
        try:
            exchange.run([(prepared, [gradient(400_000, seed=rank)])])
        except PeerError as error:
            return str(error)
    return "no error"


def test_a_rank_that_is_gone_ends_every_wait_with_an_error_that_names_it() -> None:
    *others, gone = run_ranks(3, one_leaves)
    assert gone == "left"
    for said in others:
        assert "rank 2 closed its connections without a word" in said


def one_sends_another_program(rank: int) -> str:
    """Without any agreement between ranks, data of another program never meets a buffer."""
    exchange = Exchange(connect(1))
    size = 4000 if rank == 0 else 4001
    prepared = exchange.prepared(CODECS["identity"], NAMED["alltoall"], ["x"], [size])
    if rank == 1:
        threading.Timer(1.0, lambda: exchange.channel.fail(PeerError("rank 1 gives up"))).start()
    with pytest.raises(PeerError, match="rank 1 gives up"):
        exchange.run([(prepared, [gradient(size, seed=rank)])])
    return "raised"


def test_a_failure_of_the_channel_ends_an_exchange_that_waits() -> None:
    assert run_ranks(2, one_sends_another_program) == ["raised"] * 2


def one_is_damaged(rank: int) -> str:
    exchange = Exchange(connect(1))
    prepared = exchange.prepared(CODECS["identity"], NAMED["alltoall"], ["x"], [4000])
    if rank == 1:  # another step: what it sends is not what rank 0 expects
        exchange.step = 7
    with pytest.raises(PeerError) as raised:
        exchange.run([(prepared, [gradient(4000, seed=rank)])])
    return str(raised.value)


def test_a_frame_of_another_step_is_refused_by_name() -> None:
    for said in run_ranks(2, one_is_damaged):
        assert "sent something else" in said
        assert "at step" in said
