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
from ranks import TIMEOUT, run_ranks
from test_attach_noise import Task
from test_factors_on_stream import OVERFLOW, kept, train
from test_on_stream import _copied
from test_programs import compiled
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from training import same

import gradzip
from gradzip import Fixed, Option, Rules, Unsupported
from gradzip.codecs import parse
from gradzip.engines.cuda import pack_select
from gradzip.exchange import rounds
from gradzip.exchange.coding import Message
from gradzip.exchange.interpreter import Interpreter, run_rounds
from gradzip.exchange.message_codecs import message_codec, stream_codec
from gradzip.exchange.on_stream import compensated
from gradzip.exchange.on_stream import runner as on_stream
from gradzip.exchange.on_stream.runner import StreamMessage, StreamRunner
from gradzip.exchange.topology import Topology
from gradzip.exchange.way import Way
from gradzip.feedback import Memory
from gradzip.hooks import runners
from gradzip.routes import NAMED
from gradzip.sensitivity.shape import SecondMoments

pytestmark = pytest.mark.skipif(emulated.COMPILER is None, reason="needs g++")
SIZES = [3, 1300, 1, 700, 2601, 33, 640]
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
        for (first, last), (buffer, message) in zip(itertools.pairwise(self._cuts), self._made):
            torch._foreach_copy_(list(message.tensors), gradients[first:last])
            self.runner.take(buffer, [message], last == self._cuts[-1])
        return [tensor.clone() for _, message in self._made for tensor in message.tensors]


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
    pack_select.serves = lambda tensor: False  # type: ignore[assignment]  # emulated packing takes most of the time
    world, wrong = dist.get_world_size(), list[str]()
    for dtype, cuts in ((torch.float32, [0, 7]), (torch.bfloat16, [0, 1, 3, 7]), (torch.float16, [0, 4, 7]))[
        : 5 - world
    ]:
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


# All codecs on two ranks, in all types; one of each kind on more.
ALL = [*((c, None) for c in CODECS), *((c, "alltoall") for c in CODED)]
KINDS = [
    *("sign", "terngrad", "natural:bits=3", "qsgd:bits=5,bucket=64", "randomk:ratio=0.1", "topk:ratio=0.05"),
    *("cast:feedback=true", "int4:block=128,hadamard=true,feedback=true"),
]
SOME = [*((c, None) for c in KINDS), ("sign", "alltoall"), ("natural:bits=3", "alltoall")]


@pytest.mark.parametrize(
    ("world", "codec", "route"), [*((2, *case) for case in ALL), *((world, *case) for world in (3, 4) for case in SOME)]
)
def test_means_and_residuals_are_those_of_the_interpreter(world: int, codec: str, route: str | None) -> None:
    for wrong in run_ranks(world, compared, codec, route):
        assert wrong == []


# --- Nothing waits --------------------------------------------------------------------------------------------------


class NoWaits(TorchDispatchMode):
    """Refuses what would have the host wait for a GPU, or copy from memory that is not pinned."""

    REFUSED = frozenset({"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "lift_fresh"})
    METHODS = ("tolist", "numpy", "cpu")  # which the dispatcher does not see

    def __enter__(self) -> Any:
        self._kept = {name: getattr(torch.Tensor, name) for name in self.METHODS}
        for name in self.METHODS:
            setattr(torch.Tensor, name, self._refuse)
        return super().__enter__()

    def __exit__(self, *about: Any) -> None:
        for name, method in self._kept.items():
            setattr(torch.Tensor, name, method)
        super().__exit__(*about)

    @staticmethod
    def _refuse(*given: Any, **options: Any) -> Any:
        raise AssertionError("it waits for the GPU")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        # an assignment of one device's tensor to another's, or indexing by a mask, which looks for what is set in it
        masked = name.startswith(("index", "_index")) and any(
            isinstance(each, torch.Tensor) and each.dtype == torch.bool
            for index in args[1:2]
            if isinstance(index, list | tuple)
            for each in index
        )
        assert name not in self.REFUSED, f"{name} waits for the GPU"
        assert not masked, f"{name} by a mask waits for the GPU"
        return func(*args, **(kwargs or {}))


def guarded(method: Any) -> Any:
    def guard(*arguments: Any) -> Any:
        with NoWaits():
            return method(*arguments)

    return guard


def unhurried(rank: int, codecs: list[tuple[str, str | None]]) -> list[str]:
    streams.install()
    upload = compensated.upload

    def pinned(*given: Any) -> torch.Tensor:  # it makes a tensor on the host, from where nobody waits for the copy
        with _disable_current_modes():
            return upload(*given)

    compensated.upload = pinned
    seen, world = list[str](), dist.get_world_size()
    for codec, route in codecs:
        mine = Streams(codec, route, torch.bfloat16, [0, 7])
        for step in (0, 2, 3):
            if step == 3:  # tables are made, and the device decides
                message = mine._made[0][1].message
                assert message is not None
                for part, names in (
                    (message, ["encode", "reduce", "decode", "norm"]),
                    (message.residuals, ["begin", "end"]),
                ):
                    for name in names if part is not None else ():
                        setattr(part, name, guarded(getattr(part, name)))
            mine.step(step, given(world, step, torch.bfloat16)[rank], STEPS[step][1])
        mine.runner.drain()
        seen.append(codec)
    return seen


def test_no_message_waits_for_the_gpu() -> None:
    codecs = [*((codec, None) for codec in CODECS), *((codec, "alltoall") for codec in CODED)]
    for seen in run_ranks(2, unhurried, codecs, deadline=200):
        assert seen == [codec for codec, _ in codecs]


ACTS = [lambda x: bool(x.any()), lambda x: x.tolist(), lambda x: x[x > 0], lambda x: x.nonzero()]


@pytest.mark.parametrize("act", ACTS)
def test_what_waits_is_found(act: Any) -> None:
    x = torch.randn(5)
    with pytest.raises(AssertionError, match="waits"), NoWaits():
        act(x)


# --- By attach -------------------------------------------------------------------------------------------------------

POLICIES = {
    "sign": Fixed("sign"),
    "sign by alltoall": Fixed(Option("sign", route="alltoall")),
    "topk": Fixed("topk:ratio=0.1"),
    "randomk": Fixed("randomk:ratio=0.2"),
    "qsgd": Fixed("qsgd:bits=4"),
    "int8 with feedback": Fixed("int8:feedback=true"),
    "several": Rules({"0.weight": "onebit", "2.weight": "topk:ratio=0.2", "*.bias": "noise"}, small=True),
}


def saved(task: Task) -> dict[str, Any]:
    parts = {"model": task.model.module, "optimizer": task.optimizer, "handle": task.handle}
    return {key: torch.utils._pytree.tree_map(_copied, part.state_dict()) for key, part in parts.items()}


def resumed(policy: Any, state: dict[str, Any], first: int, last: int) -> list[torch.Tensor]:
    task, state = Task(policy), copy.deepcopy(state)  # an optimizer goes on in the tensors that it is given
    task.model.module.load_state_dict(state["model"])
    task.optimizer.load_state_dict(state["optimizer"])
    task.handle.load_state_dict(state["handle"])
    train(task, first, last)
    return task.parameters()


def attached(rank: int, name: str) -> dict[str, Any]:
    """A rank's gradients are infinite in step 5. States of either runner are gone on from by the other."""
    out, states, choose = dict[str, Any](), dict[str, dict[int, Any]](), runners.choose
    streams.install()
    for case in ("host", "stream"):
        runners.choose = choose if case == "stream" else lambda *given: runners.HOST
        task, states[case] = Task(POLICIES[name]), {}
        for number in range(8):
            if number in (1, OVERFLOW, OVERFLOW + 1):
                states[case][number] = saved(task)
            train(task, number, number + 1)
            if number == 7 and case == "stream":
                assert task.handle._stream is not None
                out["waits"] = task.handle._stream._open is not None
        out[case], out[f"{case} keeps"] = task.parameters(), kept(task)
        out[f"{case} runner"] = task.handle.stats()["runner"]
    for case, other in (("stream", "stream"), ("host", "stream"), ("stream", "host")):
        runners.choose = choose if other == "stream" else lambda *given: runners.HOST
        for number in states[case]:
            out[f"from {number} of {case} by {other}"] = resumed(POLICIES[name], states[case][number], number, 8)
    runners.choose = choose
    large = Task(POLICIES[name], bucket_mb=25, gradient_as_bucket_view=True)
    train(large, 0, 8)
    out["large"] = large.parameters()
    return out


@pytest.mark.parametrize(("world", "name"), [*((2, name) for name in POLICIES), (3, "sign by alltoall"), (4, "topk")])
def test_attach_gives_the_host_runners_bits_and_states_move_between_runners(world: int, name: str) -> None:
    ranks = run_ranks(world, attached, name)
    for found in ranks:
        assert found["stream runner"] == "stream" != found["host runner"]
        assert not found["waits"], "once buckets stay where they are, the device decides"
        for case, parameters in found.items():
            if case.startswith("from") or case in ("host", "stream", "large"):
                assert same(parameters, ranks[0]["host"]), case
        assert found["host keeps"].keys() == found["stream keeps"].keys()
        for key, value in found["host keeps"].items():
            assert same_bits(value, found["stream keeps"][key]), key


def changed(rank: int) -> dict[str, Any]:
    """From codec to codec, the first step after a change overflows; then ranks run out of inputs."""
    out, choose = dict[str, Any](), runners.choose
    streams.install()
    for case in ("host", "stream"):
        runners.choose = choose if case == "stream" else lambda *given: runners.HOST
        task = Task(Fixed(Option("sign", route="alltoall")))
        train(task, 0, 4)
        policies: list[Any] = [Fixed("int4:feedback=true"), "noise", Fixed("topk:ratio=0.1"), Fixed("sign")]
        for number, policy in enumerate(policies):
            first = 4 + 3 * number
            task.handle.set_policy(policy)
            train(task, first, first + 3, overflow=first)
        out[case], out[f"{case} keeps"] = task.parameters(), kept(task)
        with Join([task.model]):
            for number in range(16, 19 if rank == 0 else 21):
                task.step(number)
        out[f"{case} joined"] = task.parameters()
    runners.choose = choose
    return out


def test_residuals_go_from_codec_to_codec_and_through_uneven_inputs() -> None:
    ranks = run_ranks(2, changed)
    for found in ranks:
        assert same(found["stream"], ranks[0]["host"])
        assert alike(found["stream keeps"], found["host keeps"]) == []
        assert same(found["stream joined"], found["host joined"])


def convolved(rank: int) -> dict[str, Any]:
    """Gradients that are not row-major, in 16 bits."""
    out, choose = dict[str, Any](), runners.choose
    streams.install()
    for case in ("host", "stream"):
        runners.choose = choose if case == "stream" else lambda *given: runners.HOST
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(72, 10))
        net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stubs lack memory_format
        model = nn.parallel.DistributedDataParallel(net.bfloat16(), gradient_as_bucket_view=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        policy = Rules({"0.weight": Option("sign", route="alltoall"), "2.weight": "topk:ratio=0.1"}, small=True)
        handle = gradzip.attach(model, optimizer, policy, timeout=TIMEOUT)
        for step in range(5):
            optimizer.zero_grad()
            draw = torch.Generator().manual_seed(10 * step + rank)
            model(torch.randn(4, 3, 5, 5, generator=draw).bfloat16()).square().mean().backward()
            optimizer.step()
        out[case] = [p.detach().clone() for p in net.parameters()]
        state = handle.state_dict()
        out[f"{case} keeps"] = {k: torch.as_tensor(v) for k, v in state.items() if "residual/" in k}
    runners.choose = choose
    return out


def test_gradients_of_16_bits_that_are_not_row_major() -> None:
    ranks = run_ranks(2, convolved)
    for found in ranks:
        assert same(found["stream"], ranks[0]["host"])
        assert alike(found["stream keeps"], found["host keeps"]) == []
        assert len(found["stream keeps"]) >= 2


# --- Which runner ----------------------------------------------------------------------------------------------------


def test_what_streams_cannot_carry_stays_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_stream, "reason_against", lambda group, device: None)
    group, device = object(), torch.device("cuda", 0)

    def chosen(codec: str, route: str, dtype: torch.dtype = torch.float32, patient: bool = False) -> str:
        ways = {"weight": Way(parse(codec), route, False, None)}
        return runners.choose(ways, {"weight": dtype}, device, group, patient)  # type: ignore[arg-type]

    usual = [("sign", "allgather"), ("natural", "alltoall"), ("topk", "allgather"), ("randomk", "allreduce")]
    for codec, route in (*usual, ("int8:feedback=true", "alltoall")):
        assert chosen(codec, route) == runners.STREAM
        on_gpu = str(NAMED[route].on("gpu"))
        assert chosen(codec, on_gpu) == runners.STREAM
    assert chosen("int8", "alltoall") == runners.STREAM
    assert chosen("natural", str(NAMED["alltoall"].on("cpu"))) == runners.HOST, "it is to be coded on the CPU"
    assert chosen("sign", "allgather", torch.float64) == runners.HOST
    assert chosen("sign", "allgather", patient=True) == runners.HOST
    for codec, route in (
        ("topk", "alltoall"),
        ("randomk", "alltoall"),
        ("sign", "ring"),
        ("sign:feedback=cpu", "allgather"),
    ):
        assert chosen(codec, route) == runners.HOST
    with pytest.raises(Unsupported, match="noise on cuda:0, for 'weight': streams alone carry it there"):
        chosen("noise", str(NAMED["alltoall"].on("cpu")))
    with pytest.raises(Unsupported, match="write all its steps for one of the two"):
        chosen("sign", "enc.gpu > ag.flat > dec.cpu")
    assert stream_codec(parse("qsgd:bucket=100")) is None, "rows of 32 values would belong to two buckets"
