"""The stream runner over NCCL: ranks share a GPU, and the means are those of the interpreter on the CPU."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import same_bits
from ranks import TIMEOUT, run_ranks
from test_coded_on_stream import CODECS
from test_programs import compiled
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import same

import gradzip
from gradzip.codecs import Context, parse
from gradzip.engines.noise_layout import Shapes
from gradzip.exchange import rounds
from gradzip.exchange.coding import Message
from gradzip.exchange.compiler import compile_route
from gradzip.exchange.interpreter import Interpreter, run_rounds
from gradzip.exchange.message_codecs import message_codec, stream_codec
from gradzip.exchange.on_stream import runner as on_stream
from gradzip.exchange.on_stream import slots
from gradzip.exchange.program import Program
from gradzip.exchange.topology import Topology
from gradzip.feedback import Memory
from gradzip.routes import NAMED
from gradzip.sensitivity.near import memory_order

WORLD, STEPS = 4, 11


def flat(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """In the order of memory, on the CPU."""
    return x.detach().permute(memory_order(like)).reshape(-1).cpu()


class Trained:
    def __init__(
        self, policy: Any, bucket_mb: float, layout: torch.memory_format = torch.channels_last, **more: Any
    ) -> None:
        torch.manual_seed(1)
        torch.backends.cudnn.deterministic = True
        net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 200), nn.Linear(200, 7))
        net.cuda().to(memory_format=layout)  # type: ignore[call-overload]  # torch's stubs lack memory_format
        self.model = DistributedDataParallel(net, bucket_cap_mb=bucket_mb)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        policy = gradzip.Fixed(policy) if isinstance(policy, str) else policy
        self.handle = gradzip.attach(self.model, self.optimizer, policy, timeout=TIMEOUT, **more)
        self.names = [name for name, _ in net.named_parameters()]
        self.parameters = list(net.parameters())

    def backward(self, number: int) -> list[torch.Tensor]:
        self.optimizer.zero_grad()
        draw = torch.Generator().manual_seed(100 * number + dist.get_rank())
        self.model(torch.randn(8, 3, 8, 8, generator=draw).cuda()).square().mean().backward()
        return [flat(p.grad, p) for p in self.parameters if p.grad is not None]

    def program(self, codec: Any) -> Program:
        topology = Topology(0, tuple((rank,) for rank in range(WORLD)))
        sizes = [p.numel() for p in self.parameters]
        return replace(compiled(NAMED["alltoall"], sizes, codec, topology), names=tuple(self.names))


def one_by_one(codec: Any, rank: int, number: int, everybodys: Any, program: Program, memories: list[Memory]) -> Any:
    """The means of codecs whose parts or numbers are exchanged one by one, as the host runner makes them."""
    topology = Topology(0, tuple((r,) for r in range(WORLD)))
    if program.route == NAMED["allreduce"]:
        contexts = [[Context(name, number, 0, r, WORLD) for name in program.names] for r in range(WORLD)]
        run_rounds([rounds.of(codec, *each) for each in zip(everybodys, contexts, memories)], topology)
        means = everybodys[rank]
    else:
        whole = message_codec(codec)
        assert whole is not None
        messages = [Message(program.names, torch.float32, r, WORLD, number, memory=memories[r]) for r in range(WORLD)]
        means = Interpreter(program, whole, messages).run(everybodys)[rank]
    for memory in memories:
        memory.commit() if all(bool(mean.isfinite().all()) for mean in means) else memory.drop()
    return means


def fed_back(rank: int, policy: str) -> dict[str, Any]:
    """A rank has an infinite gradient in step 6; residuals are compared after that and in the end."""
    task, codec = Trained(policy, 0.02), parse(policy)
    made = stream_codec(codec)
    assert made is not None
    sizes = [p.numel() for p in task.parameters]
    program = compile_route(
        policy, made.route, task.names, sizes, torch.float32, Topology(0, tuple((r,) for r in range(WORLD)))
    )
    memories, wrong, reduce = [Memory(r) for r in range(WORLD)], list[str](), task.handle.reduce

    def watched(bucket: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return reduce(bucket)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    for number in range(STEPS):
        hook = task.parameters[0].register_hook(lambda g: g * torch.inf) if (number, rank) == (6, 1) else None
        with task.model.no_sync():
            own = task.backward(number)
        everybodys = gathered(own)
        task.handle.reduce = watched if number in (5, 6, 10) else reduce  # type: ignore[method-assign]
        means = task.backward(number)
        expected = one_by_one(codec, rank, number, everybodys, program, memories)
        for name, a, b in zip(task.names, means, expected):
            if not same_bits(a.nan_to_num(), b.nan_to_num()) or not torch.equal(a.isnan(), b.isnan()):
                wrong.append(f"{name} at {number}")
        if number in (6, STEPS - 1):  # where the device has decided
            held = {key: torch.as_tensor(value).cpu() for key, value in task.handle.state_dict().items()}
            for key, value in memories[rank].state_dict().items():
                if "residual/" not in key:
                    continue
                name = key.rpartition("/")[2]
                other = held.get(key)
                if "residual/gradient" in key and other is not None:
                    other = flat(other, task.parameters[task.names.index(name)])
                if other is None or not torch.equal(other.reshape(-1), torch.as_tensor(value).reshape(-1)):
                    wrong.append(f"{key} after {number}")
        if hook is not None:
            hook.remove()
        if number != 6:
            task.optimizer.step()
    return {
        "wrong": wrong,
        "runner": task.handle.stats()["runner"],
        "parameters": [p.detach().cpu() for p in task.parameters],
    }


@pytest.mark.gpu
@pytest.mark.timeout(320)
@pytest.mark.parametrize("policy", CODECS)
def test_codecs_of_parts_give_the_interpreters_means_and_residuals_and_never_wait(policy: str) -> None:
    ranks = run_ranks(WORLD, fed_back, policy, deadline=300, backend="nccl")
    for found in ranks:
        assert found["wrong"] == []
        assert found["runner"] == "stream"
        assert same(found["parameters"], ranks[0]["parameters"])


def gathered(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    own = torch.cat(tensors).cuda()
    all_ranks = [torch.empty_like(own) for _ in range(WORLD)]
    dist.all_gather(all_ranks, own)
    return [list(x.cpu().split_with_sizes([t.numel() for t in tensors])) for x in all_ranks]


def trained(rank: int, policy: str) -> dict[str, Any]:
    slots.FIRST_ROOM = 100.0  # every frame fits: none is coarser than the interpreter's
    task, made = Trained(policy, 0.02), stream_codec(parse(policy))
    assert made is not None
    codec = made.codec
    program, wrong = task.program(codec), []
    for number in range(STEPS):
        with task.model.no_sync():
            own = task.backward(number)
        everybodys = gathered(own)
        means = task.backward(number)
        found = task.handle._shapes.of(task.names)
        shapes = Shapes([None if shape is None else shape.cpu() for shape in found])
        messages = [Message(program.names, torch.float32, r, WORLD, number, 0, shapes) for r in range(WORLD)]
        expected = Interpreter(program, codec, messages).run(everybodys)[rank]
        wrong += [f"{name} at {number}" for name, a, b in zip(task.names, means, expected) if not same_bits(a, b)]
        task.optimizer.step()
    stats, state = task.handle.stats(), task.handle.state_dict()
    task.handle.detach()
    again = Trained(policy, 25)
    again.handle.load_state_dict(state)
    return {"wrong": wrong, "parameters": [p.detach().cpu() for p in task.parameters], "stats": stats,
            "shaped": sum(shape is not None for shape in found)}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.timeout(320)
@pytest.mark.parametrize("policy", ["noise", "cast", "int8", "int4", "fp8", "int4:block=128,hadamard=true"])
def test_means_are_those_of_the_interpreter_and_replicas_identical(policy: str) -> None:
    ranks = run_ranks(WORLD, trained, policy, deadline=300, backend="nccl")
    for found in ranks:
        assert found["wrong"] == []
        assert same(found["parameters"], ranks[0]["parameters"])
        assert found["stats"]["runner"] == "stream"
        assert found["stats"]["steps"] == STEPS
    if policy == "noise":
        assert ranks[0]["shaped"] == len(ranks[0]["parameters"])
        assert 0 < ranks[0]["stats"]["noise"]["worst"] <= 0.02


def hurried(rank: int, policy: str) -> str:
    task = Trained(policy, 0.02)
    for number in range(4):  # kernels are compiled, and messages made
        task.backward(number)
    task.handle.stats()  # from here on times are taken
    task.handle.trace(os.devnull, steps=4)
    reduce = task.handle.reduce

    def watched(bucket: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return reduce(bucket)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    task.handle.reduce = watched  # type: ignore[method-assign]
    try:
        for number in range(4, 18):  # slots change in two of them
            task.backward(number)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.gpu
@pytest.mark.timeout(220)
@pytest.mark.parametrize("policy", ["noise", "cast", "int8"])
def test_hooks_never_wait_for_the_gpu(policy: str) -> None:
    assert run_ranks(2, hurried, policy, backend="nccl") == ["", ""]


def timed(rank: int, folder: str) -> tuple[float, float]:
    task = Trained("noise", 0.02)
    for number in range(4):
        task.backward(number)
    before = task.handle.stats()["exposed_seconds"]
    torch.cuda.synchronize()
    began = time.perf_counter()
    task.handle.trace(Path(folder) / f"{rank}.json", steps=2)
    for number in range(4, 8):
        task.backward(number)
    return task.handle.stats()["exposed_seconds"] - before, time.perf_counter() - began


@pytest.mark.gpu
@pytest.mark.timeout(220)
def test_streams_are_timed_by_the_gpu(tmp_path: Path) -> None:
    for rank, (exposed, passed) in enumerate(run_ranks(2, timed, str(tmp_path), backend="nccl")):
        assert 0 < exposed < passed
        events = json.loads((tmp_path / f"{rank}.json").read_text())["traceEvents"]
        tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
        spans = [(tracks[e["pid"], e["tid"]], e) for e in events if e["ph"] == "X"]
        assert {track for track, _ in spans} >= {"compute", "exposed", "encode", "all-to-all", "add", "all-gather"}
        assert all(0 <= e["dur"] < 1e6 * passed for _, e in spans)
        assert sum(e["dur"] for track, e in spans if track == "decode") > 0


def held(handle: gradzip.Handle) -> list[torch.Tensor]:
    """What PowerSGD keeps of all matrices, left together as kernels put it."""
    torch.cuda.synchronize()
    (kept,) = {bundle.kept for bundle in handle._memory._bundles.values()}
    return [kept.right.cpu(), kept.after.cpu()]  # type: ignore[attr-defined]


def factored(rank: int) -> dict[str, Any]:
    """PowerSGD on streams, with its kernels; a rank has an infinite gradient in step 6, of which the host takes back
    what was noted, as a state was saved before; and in step 9, of which the device does.
    """
    task, out, kept = Trained("powersgd:rank=2", 0.02, torch.contiguous_format), dict[str, Any](), list[Any]()
    reduce = task.handle.reduce

    def watched(bucket: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return reduce(bucket)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    for number in range(STEPS):
        if number == 4:
            task.handle.reduce = watched  # type: ignore[method-assign]
        if number in (6, 9) and rank == 1:
            hook = task.parameters[0].register_hook(lambda gradient: gradient * torch.inf)
        if number == 6:
            assert task.handle._stream is not None
            out["waits"] = task.handle._stream._open is not None
            task.handle.reduce = reduce  # type: ignore[method-assign]
            kept.append(task.handle.state_dict())
        matrices = held(task.handle) if number == 9 else []
        means = task.backward(number)
        if number == 6:
            kept.append(task.handle.state_dict())
            out["finite"] = all(bool(mean.isfinite().all()) for mean in means)
        if number == 9:
            out["device waits"] = task.handle._stream._open is not None  # type: ignore[union-attr]
            out["restored"] = all(torch.equal(now, was) for now, was in zip(held(task.handle), matrices, strict=True))
        if number not in (6, 9):
            task.optimizer.step()
        elif rank == 1:
            hook.remove()
    before, after = (
        {k: torch.as_tensor(v).cpu() for k, v in state.items() if "residual/" in k or "codec/" in k} for state in kept
    )
    out["same"] = before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in before)
    out["kept"] = sum("residual/" in key for key in before)
    out["parameters"] = [p.detach().cpu() for p in task.parameters]
    out["runner"] = task.handle.stats()["runner"]
    return out


@pytest.mark.gpu
@pytest.mark.timeout(320)
def test_powersgd_on_streams_keeps_replicas_identical_and_nothing_of_a_step_that_overflows() -> None:
    ranks = run_ranks(WORLD, factored, deadline=300, backend="nccl")
    for found in ranks:
        assert found["runner"] == "stream"
        assert same(found["parameters"], ranks[0]["parameters"])
        assert all(bool(p.isfinite().all()) for p in found["parameters"])
        assert not found["waits"], "once buckets stay where they are, the device decides"
        assert not found["finite"]
        assert found["same"]
        assert found["kept"] == 3
        assert not found["device waits"]
        assert found["restored"]


def changed(rank: int) -> dict[str, Any]:
    """From PowerSGD to noise: the step after the change codes gradients with what PowerSGD has lost of them."""
    slots.FIRST_ROOM = 100.0
    task = Trained("powersgd:rank=2", 0.02, torch.contiguous_format)
    for number in range(5):
        task.backward(number)
        task.optimizer.step()
    state = task.handle.state_dict()
    task.handle.set_policy(gradzip.Fixed("noise"))
    with task.model.no_sync():
        own = task.backward(5)
    lost = [state.get(f"rank{rank}/residual/gradient/{name}") for name in task.names]
    totals = [x if r is None else x + torch.as_tensor(r).reshape(-1).cpu() for x, r in zip(own, lost)]
    everybodys, means = gathered(totals), task.backward(5)
    made = stream_codec(parse("noise"))
    assert made is not None
    codec, program = made.codec, task.program(made.codec)
    shapes = Shapes([None if shape is None else shape.cpu() for shape in task.handle._shapes.of(task.names)])
    messages = [Message(program.names, torch.float32, r, WORLD, 5, 0, shapes) for r in range(WORLD)]
    expected = Interpreter(program, codec, messages).run(everybodys)[rank]
    task.optimizer.step()
    for number in range(6, 9):
        task.backward(number)
        task.optimizer.step()
    return {
        "lost": sum(r is not None for r in lost),
        "wrong": [name for name, a, b in zip(task.names, means, expected) if not same_bits(a, b)],
        "kept": sum("residual/" in key for key in task.handle.state_dict()),
        "runner": task.handle.stats()["runner"],
        "parameters": [p.detach().cpu() for p in task.parameters],
    }


@pytest.mark.gpu
@pytest.mark.timeout(320)
def test_residuals_are_added_when_the_policy_changes_on_streams() -> None:
    ranks = run_ranks(WORLD, changed, deadline=300, backend="nccl")
    for found in ranks:
        assert found["lost"] == 3
        assert found["wrong"] == []
        assert found["kept"] == 0
        assert found["runner"] == "stream"
        assert same(found["parameters"], ranks[0]["parameters"])


def learnt(rank: int) -> dict[str, Any]:
    """A policy that looks at means, which stay on the GPU; a rank has an infinite gradient in step 4."""
    policy = gradzip.Accordion(gradzip.Fixed("noise"), gradzip.Fixed("noise:share=10%"), window=2, threshold=0.2)
    task = Trained(policy, 0.02)
    for number in range(STEPS):
        if number == 4 and rank == 1:
            hook = task.parameters[0].register_hook(lambda gradient: gradient * torch.inf)
        task.backward(number)
        if number != 4:
            task.optimizer.step()
        elif rank == 1:
            hook.remove()
    task.handle.stats()
    return {
        "history": task.handle.stats()["history"],
        "runner": task.handle.stats()["runner"],
        "steps": policy._steps,
        "parameters": [p.detach().cpu() for p in task.parameters],
    }


@pytest.mark.gpu
@pytest.mark.timeout(320)
def test_a_policy_that_learns_decides_alike_on_all_ranks() -> None:
    ranks = run_ranks(WORLD, learnt, deadline=300, backend="nccl")
    for found in ranks:
        assert found["runner"] == "stream"
        assert found["steps"] == STEPS - 1, "the step that is not finite does not count"
        assert found["history"] == ranks[0]["history"]
        assert [entry["step"] for entry in found["history"]] == [2, 4, 6, 8, 10]
        assert len({len(entry["critical"]) for entry in found["history"]}) > 1, "it has decided both ways"
        assert same(found["parameters"], ranks[0]["parameters"])


def orphaned(rank: int) -> dict[str, Any]:
    """The heart of rank 1 stops, and it sends no more; rank 0 waits for it on the GPU, with the host in CUDA."""
    task = Trained("noise", 25, heartbeat=timedelta(seconds=3))
    for number in range(4):
        task.backward(number)
    torch.cuda.synchronize()
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        task.handle._channel.health.stop()
        store.wait(["told"], TIMEOUT)
        return {}
    out: dict[str, Any] = {"said": ""}
    try:
        for number in range(4, 8):
            task.backward(number)
            torch.cuda.synchronize()
    except RuntimeError as error:
        out |= {"said": str(error), "at": number}
    try:
        task.handle.state_dict()
    except gradzip.PeerError as error:
        out["state"] = str(error)
    store.set("told", "1")
    return out


@pytest.mark.gpu
@pytest.mark.timeout(220)
def test_a_rank_that_waits_on_the_gpu_for_one_that_is_gone_ends_with_an_error() -> None:
    found, _ = run_ranks(2, orphaned, backend="nccl")
    assert "rank 1 has shown no sign of life for 3 s" in found["said"]
    assert found["at"] == 5, "the aborted step is given to nobody for good"
    assert "Go on from the last checkpoint" in found["state"]


def damaged(rank: int) -> str:
    task, exchange = Trained("noise", 25), on_stream.all_to_all

    def damage(out: torch.Tensor, sent: torch.Tensor, group: Any) -> Any:
        sent.view(2, -1)[0, 26] ^= 0xFF  # in the head of the frame for rank 0
        return exchange(out, sent, group)

    try:
        for number in range(6):
            if number == 2 and rank == 1:
                on_stream.all_to_all = damage
            task.backward(number)
            on_stream.all_to_all = exchange
    except RuntimeError as error:
        return f"{number}: {error}"
    return ""


@pytest.mark.gpu
@pytest.mark.timeout(220)
def test_a_damaged_frame_is_told_two_steps_later() -> None:
    for said in run_ranks(2, damaged, backend="nccl"):
        assert said.startswith("4: ")
        assert "at step 2 rank 1 sent a frame of '" in said
