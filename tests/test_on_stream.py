"""The stream runner on its stand-in: the bits of the interpreter, whatever DDP does with its buckets."""

from __future__ import annotations

import itertools
import threading
import time
import warnings
from typing import Any

import emulated
import pytest
import streams
import torch
import torch.distributed as dist
from conftest import gradient, same_bits
from ranks import run_ranks
from test_attach_noise import OPTIMIZERS, Task
from test_programs import compiled
from torch import nn
from torch.distributed.algorithms.join import Join
from training import same

import gradzip
from gradzip import Fixed, GradzipWarning, Option, PeerError, Rules, Unsupported
from gradzip.codecs import parse
from gradzip.engines.noise_layout import Shapes
from gradzip.exchange.coding import Message
from gradzip.exchange.interpreter import Interpreter
from gradzip.exchange.message_codecs import stream_codec
from gradzip.exchange.on_stream import runner as on_stream
from gradzip.exchange.on_stream.noise import NoiseMessage
from gradzip.exchange.on_stream.runner import StreamMessage, StreamRunner
from gradzip.exchange.topology import Topology
from gradzip.sensitivity.shape import SecondMoments

pytestmark = pytest.mark.skipif(emulated.COMPILER is None, reason="needs g++")
SIZES = [3, 3000, 1, 700, 9001]
NAMES = [f"t{i}" for i in range(len(SIZES))]
STEPS = (5, 6)
SCALED = ["int8", "int4", "fp8", "int4:block=128,hadamard=true"]


class GivenShapes(SecondMoments):
    """Shapes for every other tensor."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__([], {})
        drawn = [torch.randint(-12, 1, (n,), generator=torch.Generator().manual_seed(n + seed)) for n in SIZES]
        self._shapes = {name: x.to(torch.int8) for i, (name, x) in enumerate(zip(NAMES, drawn)) if i % 2}
        self._flat = torch.cat([shape for shape in self._shapes.values() if shape is not None])

    def renew(self) -> bool:
        return False


class Rank:
    """A runner with buckets of its own."""

    def __init__(self, shapes: SecondMoments) -> None:
        group = dist.group.WORLD
        assert group is not None
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.topology = Topology(self.rank, tuple((rank,) for rank in range(self.world)))
        self.runner = StreamRunner(group, torch.device("cpu"), self.topology, shapes)
        self.buckets: dict[tuple[str, int, int], tuple[torch.Tensor, StreamMessage]] = {}

    def step(self, codec: str, step: int, gradients: list[torch.Tensor], cuts: list[int]) -> list[torch.Tensor]:
        rows = self.runner.begin(step)
        taken = []
        for first, last in itertools.pairwise(cuts):
            buffer, message = self.bucket(codec, first, last, gradients[0].dtype)
            torch._foreach_copy_(list(message.tensors), gradients[first:last])
            future = self.runner.take(buffer, [message], last == cuts[-1])
            assert future.done() or on_stream.ENOUGH
            taken.append((future, buffer, message))
        assert all(future.value() is buffer for future, buffer, _ in taken)
        self.rows = rows
        return [tensor.clone() for _, _, message in taken for tensor in message.tensors]

    def bucket(self, codec: str, first: int, last: int, dtype: torch.dtype) -> tuple[torch.Tensor, StreamMessage]:
        key = f"{codec}{dtype}", first, last
        if key not in self.buckets:
            made = stream_codec(parse(codec))
            assert made is not None
            buffer = torch.empty(sum(SIZES[first:last]), dtype=dtype)
            message = StreamMessage(codec, made, NAMES[first:last], buffer.split_with_sizes(SIZES[first:last]))
            self.buckets[key] = buffer, message
        return self.buckets[key]


def of_ranks(world: int, step: int, dtype: torch.dtype) -> list[list[torch.Tensor]]:
    return [[gradient(n, 100 * step + 10 * rank + i, dtype) for i, n in enumerate(SIZES)] for rank in range(world)]


def interpreted(codec: str, step: int, gradients: list[list[torch.Tensor]], shapes: SecondMoments) -> list[Any]:
    world, dtype, made = len(gradients), gradients[0][0].dtype, stream_codec(parse(codec))
    assert made is not None
    topology = Topology(0, tuple((rank,) for rank in range(world)))
    program = compiled(made.route, SIZES, made.codec, topology, dtype=dtype)
    known = Shapes(shapes.of(NAMES))
    messages = [Message(program.names, dtype, rank, world, step, 0, known) for rank in range(world)]
    return Interpreter(program, made.codec, messages).run(gradients)[0]


def compare(rank: int, codec: str) -> dict[str, bool]:
    streams.install()
    world, found = dist.get_world_size(), {}
    for dtype in (torch.float32, torch.bfloat16):
        mine = Rank(GivenShapes())
        for step in STEPS:
            gradients = of_ranks(world, step, dtype)
            expected = interpreted(codec, step, gradients, GivenShapes())
            for cuts, on_stream.ENOUGH in (([0, 5], 0), *(([0, 1, 3, 5], enough) for enough in (0, 4000, 2 << 20))):
                means = mine.step(codec, step, gradients[rank], cuts)
                found[f"{dtype} {step} {cuts} {on_stream.ENOUGH}"] = all(map(same_bits, means, expected))
        mine.runner.drain()
    return found


WORLDS = [(2, codec) for codec in ("noise", "cast", "cast:to=fp16", "identity", *SCALED)]
WORLDS += [(world, codec) for world in (3, 4) for codec in ("noise", "cast", "int4:block=128,hadamard=true")]


@pytest.mark.parametrize(("world", "codec"), WORLDS)
def test_runner_gives_the_bits_of_the_interpreter_whatever_the_buckets(world: int, codec: str) -> None:
    for found in run_ranks(world, compare, codec):
        assert all(found.values()), found


def counted(rank: int) -> dict[str, Any]:
    streams.install()
    mine, world = Rank(GivenShapes()), dist.get_world_size()
    gradients = of_ranks(world, 5, torch.float32)
    means = mine.step("noise", 0, gradients[rank], [0, 5])
    (row,) = mine.runner.drain()
    return {"row": row, "means": means, "bytes": mine.bucket("noise", 0, 5, torch.float32)[1].message.bytes_sent}  # type: ignore[union-attr]


def test_a_row_tells_what_the_host_runner_tells() -> None:
    from test_noise_messages import expected_noise

    shapes = GivenShapes().of(NAMES)
    for found in run_ranks(3, counted):
        outcome, squares = found["row"].outcome, sum(float(m.double().square().sum()) for m in found["means"])
        assert outcome.squares == pytest.approx(squares, rel=1e-6)  # eight values at a time in float32
        assert outcome.allowed == pytest.approx(0.01 * squares, rel=1e-6)
        assert outcome.noise == pytest.approx(expected_noise(of_ranks(3, 5, torch.float32), shapes), rel=1e-5)
        assert (outcome.values, outcome.coarser, outcome.finite) == (sum(SIZES), 0, True)
        assert outcome.bytes_sent == found["bytes"]


# --- By attach -------------------------------------------------------------------------------------------------------


def attached(rank: int, optimizer: str) -> dict[str, Any]:
    """The host runner first, which gives the bits of the interpreter; then the stand-in, with several buckets."""
    logs = Task(optimizer=optimizer)
    logs.train(0, 12)
    out: dict[str, Any] = {"host": logs.parameters()}
    streams.install()
    for name, options in {"small": {}, "large": {"bucket_mb": 25, "gradient_as_bucket_view": True}}.items():
        task = Task(optimizer=optimizer, **options)
        task.train(0, 12)
        out[name], out[f"{name} stats"] = task.parameters(), task.handle.stats()
    whole = Task(optimizer=optimizer)
    for number in range(12):
        if number in (2, 7, 9):
            state = {"model": whole.model.module, "optimizer": whole.optimizer, "handle": whole.handle}
            saved = {name: torch.utils._pytree.tree_map(_copied, part.state_dict()) for name, part in state.items()}
            again = Task(optimizer=optimizer)
            again.model.module.load_state_dict(saved["model"])
            again.optimizer.load_state_dict(saved["optimizer"])
            again.handle.load_state_dict(saved["handle"])
            again.train(number, 12)
            out[f"from {number}"] = again.parameters()
            out[f"slots from {number}"] = _slots(again)
        whole.step(number)
    out["whole"], out["slots"] = whole.parameters(), _slots(whole)
    return out


def _slots(task: Task) -> dict[str, Any]:
    """Of the messages that are in use since DDP has rebuilt its buckets."""
    assert task.handle._stream is not None
    runner = task.handle._stream
    messages: list[Any] = runner._messages  # all of them are of one kind that has these buffers
    return {m.program.digest: (m.sent.numel(), m.gathered.numel()) for m in messages}


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_attach_gives_the_bits_of_the_host_runner_and_resumes(optimizer: str) -> None:
    ranks = run_ranks(3, attached, optimizer)
    for found in ranks:
        for case in ("host", "small", "large", "whole", "from 2", "from 7", "from 9"):
            assert same(found[case], ranks[0]["host"]), case
        stats = found["small stats"]
        assert stats["runner"] == "stream"
        assert stats["steps"] == 12
        assert 0 < stats["noise"]["share"] <= stats["noise"]["worst"] <= 0.02
        assert stats["noise"]["coarser"] == 0
        assert 3 < stats["noise"]["bits"] < 40, "most of these small slots is room for headers"
        assert found["slots"].keys() == found["slots from 9"].keys()


def loops(rank: int) -> dict[str, Any]:
    streams.install()
    out: dict[str, Any] = {}

    task = Task()
    for number in range(6):
        task.optimizer.zero_grad()
        with task.model.no_sync():
            task.backward(10 * number)
        task.backward(10 * number + 1)
        task.optimizer.step()
    out["accumulation"] = task.parameters(), task.handle.stats()["steps"]

    for name in ("static_graph", "find_unused_parameters"):
        chosen: dict[str, Any] = {name: True}
        task = Task(**chosen)
        task.train(0, 6)
        out[name] = task.parameters(), task.handle.stats()["steps"]

    task = Task()
    with Join([task.model]):
        for number in range(6 if rank == 0 else 8):
            task.step(number)
    out["join"] = task.parameters(), task.handle.stats()["steps"]

    task = Task(dtype=torch.bfloat16)
    task.train(0, 6)
    out["bfloat16"] = task.parameters(), task.handle.stats()["noise"]["share"]

    task = Task()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
    for number in range(6):
        task.optimizer.zero_grad()
        task.backward(number, scaler.scale(torch.tensor(torch.inf if number == 4 and rank == 1 else 1.0)))
        scaler.step(task.optimizer)
        scaler.update()
    out["overflow"] = task.parameters(), (scaler.get_scale(), task.handle.stats()["noise"]["worst"])

    task = Task()
    task.train(0, 3)
    task.handle.set_policy(Fixed("gcomp:mode=lossless"))
    task.train(3, 5)
    task.handle.set_policy("noise:share=3%")
    task.train(5, 7)
    kinds = sorted(task.handle.stats()["codecs"])
    task.handle.detach()
    task.train(7, 8)
    out["set_policy"] = task.parameters(), kinds

    task = Task(Rules({"*.weight": "noise", "0.bias": "cast"}, small=True))
    task.train(0, 6)
    out["mixed"] = task.parameters(), sorted(task.handle.stats()["codecs"])
    return out


def test_training_loops() -> None:
    ranks = run_ranks(3, loops)
    for found in ranks:
        for case, (parameters, _) in found.items():
            assert all(bool(p.isfinite().all()) for p in parameters), case
            if case != "join":  # a rank that has joined takes no more steps
                assert same(parameters, ranks[0][case][0]), f"{case}: replicas differ"
        for case in ("accumulation", "static_graph", "find_unused_parameters"):
            assert found[case][1] == 6, case
        assert same(found["static_graph"][0], found["find_unused_parameters"][0])
        assert found["join"][1] == 8
        assert found["bfloat16"][1] <= 0.02
        assert found["overflow"][1][0] == 512
        assert found["overflow"][1][1] <= 0.02, "the step that overflowed does not count"
        assert "gcomp:mode=lossless/alltoall" in found["set_policy"][1]
        assert found["mixed"][1] == ["cast/alltoall", "identity/allreduce", "noise/alltoall"]
    assert same(ranks[1]["join"][0], ranks[2]["join"][0])


# --- What goes wrong -------------------------------------------------------------------------------------------------


def corrupted(rank: int, how: str) -> dict[str, Any]:
    """In step 3 something arrives, or is there, that is not what it should be."""
    streams.install()
    task = Task(optimizer="AdamW", bucket_mb=25)
    out: dict[str, Any] = {"good": [], "said": "", "at": -1}
    exchange = on_stream.all_to_all
    try:
        for number in range(12):
            if number == 7 and rank == 1 and how == "moments":
                task.optimizer.state[next(task.model.parameters())]["exp_avg_sq"].view(-1)[:100] *= 2.0**-20
            if number == 7 and rank == 1 and how == "frame":

                def damage(out: torch.Tensor, sent: torch.Tensor, group: Any) -> Any:
                    sent.view(2, -1)[0, 26] ^= 0xFF  # in the head of the frame for rank 0
                    return exchange(out, sent, group)

                on_stream.all_to_all = damage
            out["at"] = number
            task.step(number)
            on_stream.all_to_all = exchange
            if number == 7:
                out["finite"] = bool(task.gradients().isfinite().all())
    except RuntimeError as error:
        out["said"] = str(error)
    try:
        task.handle.state_dict()
        out["state"] = "saved"
    except PeerError as error:
        out["state"] = str(error)
    return out


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("frame", "at step 7 rank 1 sent a frame of '"),
        ("moments", "at step 7 ranks have other second moments in their optimizers"),
    ],
)
def test_what_is_not_as_expected_is_told_two_steps_later(how: str, said: str) -> None:
    for found in run_ranks(2, corrupted, how):
        assert said in found["said"]
        assert "the last good step is 6" in found["said"]
        assert found["at"] == 9
        assert "Go on from the last checkpoint" in found["state"], "nothing is saved after that"
        if how == "frame":
            assert not found["finite"]


def saved_too_late(rank: int) -> str:
    """The host asks for a state right after a bad step, before it would have read the row."""
    streams.install()
    task = Task(bucket_mb=25)
    task.train(0, 2)
    if rank == 0:
        exchange = on_stream.all_gather

        def damage(out: torch.Tensor, own: torch.Tensor, group: Any) -> Any:
            own[26] ^= 0xFF
            return exchange(out, own, group)

        on_stream.all_gather = damage
    task.step(2)
    with pytest.raises(PeerError) as raised:
        task.handle.state_dict()
    return str(raised.value)


def test_no_state_is_saved_after_a_bad_step() -> None:
    for said in run_ranks(2, saved_too_late):
        assert "at step 2 rank 0 sent a sum of '" in said


def failed_in_a_hook(rank: int, first: bool) -> str:
    """A hook fails on all ranks; what became of the steps before is not known then, unless there were none."""
    streams.install()
    task = Task(bucket_mb=25)
    task.train(0, 0 if first else 3)

    def fail(*given: Any, **options: Any) -> Any:
        raise Unsupported("no such thing")

    task.handle._ways.of = fail  # type: ignore[method-assign]
    with pytest.raises(Exception, match="no such thing"):
        task.step(3)
    del task.handle._ways.of
    try:
        task.handle.state_dict()
    except PeerError as error:
        return str(error)
    return "saved"


def test_no_state_is_saved_when_an_error_leaves_steps_that_nobody_has_checked() -> None:
    for said in run_ranks(2, failed_in_a_hook, False):
        assert "no such thing. Go on from the last checkpoint" in said
    assert run_ranks(2, failed_in_a_hook, True) == ["saved", "saved"]


def lost_by_nccl(rank: int) -> str:
    """Rank 2's connections end, and NCCL tells the others of it, but not who it was."""
    streams.install()
    task = Task(bucket_mb=25)
    task.train(0, 3)
    if rank == 2:
        task.handle._channel.health.stop()
        task.handle._channel.gloo.abort()
    dist.barrier()
    if rank == 2:
        dist.barrier()
        return ""

    def lost(*given: Any) -> Any:
        raise dist.DistBackendError("NCCL error: remote process exited or there was a network error")

    on_stream.all_to_all = lost
    with pytest.raises(PeerError) as raised:
        task.step(3)
    dist.barrier()
    return str(raised.value)


def test_who_is_gone_is_told_when_nccl_is_the_first_to_notice() -> None:
    for said in run_ranks(3, lost_by_nccl)[:2]:
        assert "rank 2 closed its connections" in said
        assert "remote process exited" in said


def asked_meanwhile(rank: int) -> list[int]:
    """How many steps slots know of at the end of each, while another thread of rank 1 asks what became of them."""
    streams.install()
    mine, known = Rank(GivenShapes()), []
    gradients = of_ranks(dist.get_world_size(), 5, torch.float32)[rank]
    synchronize, asked = torch.cpu.Event.synchronize, threading.Event()

    def slow(event: Any) -> None:
        if threading.current_thread().name == "asks":
            asked.set()
            time.sleep(0.3)  # the GPU has not come that far
        synchronize(event)

    torch.cpu.Event.synchronize = slow  # type: ignore[method-assign]
    for step in range(6):
        asks = threading.Thread(target=mine.runner.drain, name="asks")
        if step > 2 and rank:
            asks.start()
            asked.wait()
        mine.step("noise", step, gradients, [0, 5])
        if asks.ident is not None:
            asks.join()
        (slots,) = mine.runner._slots.values()
        known.append(len(slots.seen["own"]))
        asked.clear()
    return known


def test_slots_are_alike_when_a_thread_asks_for_stats() -> None:
    assert run_ranks(2, asked_meanwhile) == [[0, 0, 1, 2, 3, 4]] * 2


def looked_up(rank: int) -> int:
    """How often hooks look a parameter up in a dictionary, in steps like those before."""
    streams.install()
    task, found = Task(), 0
    task.train(0, 9)
    reduce, hashed = task.handle.reduce, torch.Tensor.__hash__

    def counting(tensor: torch.Tensor) -> int:
        nonlocal found
        found += 1
        return hashed(tensor)

    def watched(bucket: Any) -> Any:
        torch.Tensor.__hash__ = counting  # type: ignore[method-assign]
        try:
            return reduce(bucket)
        finally:
            torch.Tensor.__hash__ = hashed  # type: ignore[method-assign]

    task.handle.reduce = watched  # type: ignore[method-assign]
    task.train(9, 14)
    assert task.handle._shapes.names, "second moments are used"
    return found


def test_hooks_look_no_parameter_up_in_ordinary_steps() -> None:
    assert run_ranks(2, looked_up) == [0, 0]


def loaded(rank: int) -> dict[str, Any]:
    """A state with slots, on a handle that needs no stream runner yet; and a damaged one."""
    streams.install()
    task, out = Task(), dict[str, Any]()
    task.train(0, 3)
    state = task.handle.state_dict()
    later = Task("gcomp:mode=lossless")
    later.handle.set_policy("noise")
    later.handle.load_state_dict(state)
    later.step(3)
    assert task.handle._stream is not None
    assert later.handle._stream is not None
    out["slots"] = task.handle._stream._slots.keys() <= later.handle._stream._slots.keys()
    changed: list[Any] = []
    task.handle._memory.load_state_dict = lambda *given: changed.append(given)  # type: ignore[method-assign]
    with pytest.raises(Unsupported) as raised:
        task.handle.load_state_dict(state | {"exchange/slots": torch.tensor(list(b"{}"), dtype=torch.uint8)})
    out["said"], out["changed"] = str(raised.value), len(changed)
    return out


def test_slots_of_a_state_wait_for_the_runner_and_damaged_ones_change_nothing() -> None:
    for found in run_ranks(2, loaded):
        assert found["slots"]
        assert "the state's 'exchange/slots' is damaged" in found["said"]
        assert found["changed"] == 0


def other_policies(rank: int) -> str:
    streams.install()
    task = Task()
    task.train(0, 2)
    task.handle.set_policy("noise:share=3%" if rank else "noise:share=2%")
    try:
        task.step(2)
    except Exception as error:
        return str(error)
    return ""


def test_other_policies_are_told_before_anything_is_exchanged() -> None:
    for said in run_ranks(2, other_policies):
        assert "ranks disagree" in said
        assert "noise:share=0.02" in said
        assert "noise:share=0.03" in said


def swapped(rank: int) -> str:
    """As many tensors of each codec on both ranks, but not the same ones: sizes of messages differ."""
    streams.install()
    codecs = ["noise", "cast"] if rank else ["cast", "noise"]
    try:
        rules = {"0.weight": "noise", "0.bias": "cast", "2.weight": codecs[0], "2.bias": codecs[1]}
        Task(Rules(rules, small=True)).train(0, 1)
    except Exception as error:
        return str(error)
    return ""


def test_codecs_of_other_tensors_are_told_before_anything_is_exchanged() -> None:
    for said in run_ranks(2, swapped):
        assert "ranks disagree" in said
        assert "names and codecs have the digest" in said


def moments_of_cast(rank: int) -> int:
    """Second moments that differ between ranks, where no codec asks for them."""
    streams.install()
    task = Task("cast", optimizer="AdamW")
    for number in range(9):
        if number == 5 and rank == 1:
            task.optimizer.state[next(task.model.parameters())]["exp_avg_sq"].view(-1)[:100] *= 2.0**-20
        task.step(number)
    return len(task.handle._shapes.names) + int(task.handle.stats()["steps"] != 9)


def test_second_moments_are_left_alone_where_nothing_is_rounded_by_them() -> None:
    assert run_ranks(2, moments_of_cast) == [0, 0]


def read_before_given(rank: int) -> list[bool]:
    """Whether DDP had its bucket already whenever the runner read it."""
    streams.install()
    early: list[bool] = []
    take, norm, made = StreamRunner.take, on_stream.DeviceMessage.norm, list[Any]()
    future = torch.futures.Future

    class Seen(future):  # type: ignore[misc, valid-type]
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            made.append(self)

    def seen(self: on_stream.DeviceMessage) -> torch.Tensor:
        early.append(made[-1].done())
        return norm(self)

    def taken(self: StreamRunner, *arguments: Any) -> Any:
        torch.futures.Future = Seen  # type: ignore[misc]
        try:
            return take(self, *arguments)
        finally:
            torch.futures.Future = future  # type: ignore[misc]

    on_stream.DeviceMessage.norm, StreamRunner.take = seen, taken  # type: ignore[method-assign]
    Task(Fixed("cast"), gradient_as_bucket_view=True).train(0, 2)
    return early


def test_a_bucket_is_read_before_ddp_may_write_to_it() -> None:
    for early in run_ranks(2, read_before_given):
        assert early
        assert not any(early)


def slots_kept(rank: int) -> list[bool]:
    """Whether slots have their first sizes when they are due, after steps with ordinary, no and infinite gradients."""
    streams.install(room=2.0)
    kept, codec = [], stream_codec(parse("noise"))
    assert codec is not None
    for factor in (1.0, 0.0, torch.inf):
        task = Task(bucket_mb=25)
        for number in range(12):
            task.optimizer.zero_grad()
            task.backward(number, factor)
        runner = task.handle._stream
        assert runner is not None
        program = runner._messages[0].program
        first, now = codec.slots(program), runner._slots[program.digest]
        assert first is not None
        assert now.steps > 8
        kept.append(now.sizes == first.sizes)
    return kept


def test_slots_do_not_follow_frames_without_a_finite_gradient() -> None:
    assert run_ranks(2, slots_kept) == [[False, True, True]] * 2


def results_compared(rank: int) -> str:
    streams.install()
    import os

    os.environ["GRADZIP_CHECK"] = "1"
    task = Task(optimizer="SGD")
    task.train(0, 3)
    task.handle.stats()
    if rank:
        kept = NoiseMessage.decode
        NoiseMessage.decode = lambda self, step: (kept(self, step), self._buffer.view(-1)[:1].add_(1.0))[0]  # type: ignore[method-assign, func-returns-value]
    task.step(3)
    try:
        task.handle.state_dict()
    except PeerError as error:
        return str(error)
    return ""


def test_results_that_differ_are_told_if_asked_for() -> None:
    for said in run_ranks(2, results_compared):
        assert "at step 3 ranks have other averaged gradients" in said


def refused(rank: int) -> dict[str, str]:
    streams.install()
    said = {}
    for name, policy in {
        "topk": Rules({"0.weight": "noise", "2.weight": Option("topk:ratio=0.1", None, "alltoall")}, small=True),
        "threshold": Rules({"0.weight": "noise", "2.weight": "threshold:value=0.1"}, small=True),
    }.items():
        on_stream_device = torch.device("cuda", 0)
        from gradzip.hooks import runners

        choose = runners.choose
        runners.choose = lambda ways, types, device, *rest: choose(ways, types, on_stream_device, *rest)  # noqa: B023
        with pytest.raises(Unsupported) as raised:
            Task(policy)
        runners.choose = choose
        said[name] = str(raised.value)
    return said


def test_what_the_stream_runner_cannot_do_is_refused_at_attach() -> None:
    for said in run_ranks(2, refused):
        assert "noise on cuda:0, for '0.weight'" in said["topk"]
        assert "have topk:ratio=0.1/" in said["topk"]
        assert "and on a GPU the two cannot be mixed" in said["topk"]
        assert "have threshold:value=0.1/" in said["threshold"]


def reasons(rank: int) -> str:
    group = dist.group.WORLD
    assert group is not None
    return str(on_stream.reason_against(group, torch.device("cuda", 0)))


def test_gpu_models_on_gloo_groups_are_told_what_to_do() -> None:
    (said,) = run_ranks(1, reasons)
    assert "GPU models on such groups are not supported yet: use init_process_group('nccl')" in said


def warnings_of(rank: int) -> list[str]:
    streams.install()
    task = Task()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", GradzipWarning)
        task.train(0, 6)
        task.handle.stats()
    return [str(one.message) for one in caught]


def test_an_ordinary_run_warns_of_nothing() -> None:
    assert run_ranks(2, warnings_of) == [[], []]


def embedded(rank: int) -> bool:
    """Sparse gradients are averaged by torch, beside messages of the stream runner."""
    streams.install()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(50, 8, sparse=True), nn.Flatten(), nn.Linear(32, 4))
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = gradzip.attach(model, optimizer, "noise")
    for step in range(4):
        optimizer.zero_grad()
        rows = torch.randint(0, 50, (6, 4), generator=torch.Generator().manual_seed(10 * step + rank))
        model(rows).square().sum().backward()
        optimizer.step()
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    both = [torch.empty_like(flat) for _ in range(2)]
    dist.all_gather(both, flat)
    stats = handle.stats()
    assert 0 < stats["noise"]["share"] < 0.02, "the row of checks goes behind the last bucket, which is the sparse one"
    return stats["runner"] == "stream" and same_bits(both[0], both[1]) and bool(flat.isfinite().all())


def test_sparse_gradients_are_left_to_torch() -> None:
    assert all(run_ranks(2, embedded))
