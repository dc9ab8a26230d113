"""Every message of docs/troubleshooting.md is provoked here, as users meet it, and compared word for word."""

from __future__ import annotations

import _ctypes
import contextlib
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import TIMEOUT, run_ranks
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradzip
from gradzip import Fixed, Option, Plan, Rules, engines, report
from gradzip.codecs import parse
from gradzip.emulate import launch
from gradzip.exchange.on_host.gcomp import GCompCoder
from gradzip.exchange.on_stream import runner as on_stream
from gradzip.exchange.peers import channel as connections
from gradzip.exchange.peers import heartbeat
from gradzip.exchange.way import Way
from gradzip.hooks import runners
from gradzip.report.measured import measured

PAGE = Path(__file__).parent.parent / "docs" / "troubleshooting.md"
MESSAGES = re.findall(r"^#### `(.+)`$", PAGE.read_text(), re.MULTILINE)


def pattern(message: str) -> re.Pattern[str]:
    return re.compile(".+?".join(map(re.escape, message.split("…"))), re.DOTALL)


class Loop:
    """Training with a group of its own, so that a failure does not spread to the next case."""

    def __init__(self, policy: Any, optimizer: Any = None, **attach: Any) -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 32))
        self.model = DistributedDataParallel(net, process_group=dist.new_group())
        make = optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9))
        self.optimizer = make(self.model.parameters())
        self.handle = gradzip.attach(self.model, self.optimizer, policy, **{"timeout": TIMEOUT, **attach})

    def step(self, between: Callable[[Loop], object] = lambda loop: None) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(8, 20)).square().mean().backward()
        between(self)
        self.optimizer.step()


# -- mistakes of one's own, on each rank ------------------------------------------------------------------------------


def twice() -> None:
    loop = Loop("topk")
    gradzip.attach(loop.model, loop.optimizer)


def another_hook() -> None:
    model = DistributedDataParallel(nn.Linear(4, 4))
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    gradzip.attach(model)


def other_state(change: Callable[[dict[str, Any]], object]) -> None:
    loop = Loop(Fixed("topk:ratio=0.1"))
    loop.step()
    state = loop.handle.state_dict()
    change(state)
    loop.handle.load_state_dict(state)


def one_entry_less(state: dict[str, Any]) -> None:
    own = f"rank{dist.get_rank()}/"
    state.pop(next(key for key in state if key.startswith(own) and "residual" in key))


def other_codecs(state: dict[str, Any]) -> None:
    words = bytes(state["codecs"].tolist()).replace(b"0.weight", b"9.weight")
    state["codecs"] = torch.tensor(list(words), dtype=torch.uint8)


def state_of_another_codec() -> None:
    """Of the default in older versions, under today's."""
    loop = Loop(Fixed("gcomp"))
    loop.step()
    state = loop.handle.state_dict()
    loop.handle.detach()
    Loop(None).handle.load_state_dict(state)


def strange_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Rprop(parameters)


def said_by_near_mode(between: Callable[[Loop], object]) -> None:
    loop = Loop(Fixed("gcomp:ulps=4096"))
    for _ in range(2):
        loop.step(between)
    loop.handle.stats()


def grown(loop: Loop) -> None:
    for p in loop.model.parameters():
        assert p.grad is not None
        p.grad.mul_(3)


def failing_writer() -> None:
    loop = Loop("topk")

    def full(numbers: dict[str, float], step: int) -> None:
        raise OSError("no space left")

    loop.handle.log(full, every=1)
    for _ in range(3):
        loop.step()


# -- what takes two ranks ---------------------------------------------------------------------------------------------


def other_version(rank: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(connections, "ROW_VERSION", 99)
        Loop("topk")


def absent(rank: int) -> None:
    """Rank 1 never calls attach."""
    model = DistributedDataParallel(nn.Linear(4, 4), process_group=dist.new_group())
    if rank == 0:
        gradzip.attach(model, None, "topk", timeout=timedelta(seconds=1))


def unreachable(rank: int) -> None:
    with pytest.MonkeyPatch.context() as patch:

        def no_interface(*_: Any) -> Any:
            raise RuntimeError("no such interface")

        patch.setattr(connections, "Gloo", no_interface)
        Loop("topk")


def silent(rank: int) -> None:
    """The heart of rank 1 stands still."""
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(heartbeat.Health, "_beat", lambda self: None)
        loop = Loop("topk", heartbeat=timedelta(seconds=4))
        deadline = time.monotonic() + 40
        while loop.handle._channel.error is None and time.monotonic() < deadline:
            time.sleep(0.1)
        raise loop.handle._channel.error or AssertionError("nobody noticed")


def late(rank: int) -> None:
    """Rank 1 does something else for longer than a message may take."""
    step_in_turn(Loop("topk", timeout=timedelta(seconds=6)), rank)


def step_in_turn(loop: Loop, rank: int) -> None:
    """What rank 1 has to say itself comes after rank 0 has noticed."""
    if rank == 1:
        dist.barrier()
        loop.step()
    else:
        try:
            loop.step()
        finally:
            dist.barrier()


def disagreeing(rank: int) -> None:
    Loop(Fixed("identity" if rank == 0 else "topk")).step()


def again(rank: int) -> None:
    loop = Loop(Fixed("identity" if rank == 0 else "topk"))
    with contextlib.suppress(RuntimeError):
        loop.step()
    loop.handle.reduce(None)


def gone(rank: int) -> None:
    """Rank 1 drops its connections, as if it had been killed."""
    loop = Loop(Fixed("gcomp:mode=lossless"))
    for _ in range(3):
        loop.step()
    if rank == 1:
        loop.handle._channel.gloo.abort()
    step_in_turn(loop, rank)


def flipped(rank: int) -> None:
    finish = GCompCoder.finish

    def spoiled(self: GCompCoder) -> None:
        if rank == 1:
            self._own.tensors[0][7] += 1
        finish(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADZIP_CHECK", "1")
        patch.setattr(GCompCoder, "finish", spoiled)
        Loop(Fixed("gcomp:mode=lossless")).step()


def set_up_differently(rank: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADZIP_CHECK", str(rank))
        Loop("topk")


def other_rates(rank: int) -> None:
    loop = Loop(Fixed("gcomp:ulps=4096"))
    loop.optimizer.param_groups[0]["lr"] = 0.05 if rank == 0 else 1e-5
    for _ in range(2):
        loop.model(torch.randn(8, 20)).square().mean().backward()
    loop.handle.stats()


def joined(rank: int) -> None:
    loop = Loop(Fixed("gcomp:ulps=4096"))
    with Join([loop.model]):
        for _ in range(3 + rank):
            loop.step()
    loop.handle.stats()


def sharded() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    gradzip.attach(fully_shard(nn.Linear(8, 8), mesh=init_device_mesh("cpu", (2,))))  # type: ignore[arg-type]


ON_RANKS: dict[str, Callable[[int], object]] = {
    "replicate() of torch.distributed._composable": lambda rank: gradzip.attach(replicate(nn.Linear(8, 8))),
    "keeps gradients in shards": lambda rank: sharded(),
    "this model has a handle already": lambda rank: twice(),
    "this model has another hook": lambda rank: another_hook(),
    "asks the optimizer which bits": lambda rank: Loop("gcomp", lambda parameters: None),
    "gradzip cannot tell which bits": lambda rank: Loop("gcomp", strange_optimizer),
    "what carries messages cannot be chosen": lambda rank: gradzip.attach(
        DistributedDataParallel(nn.Linear(8, 8)), transport="nccl"
    ),
    "the policy has a rule for": lambda rank: Loop(Rules({"9.*": "topk"})),
    "is not a policy": lambda rank: Loop(7),
    "the plan is for another model": lambda rank: Loop(Plan({"a": Option("gcomp")}, {"a": (2, 2)}, "Net", 25.0, {})),
    "ranks are set up differently": set_up_differently,
    "the state's": lambda rank: other_state(lambda state: state.update(steps=-1)),
    "this state has version": lambda rank: other_state(lambda state: state.update(version=99)),
    "the state was saved by": lambda rank: other_state(lambda state: state.update(world_size=3)),
    "the state is of another codec": lambda rank: state_of_another_codec(),
    "the state is of another model": lambda rank: other_state(other_codecs),
    "entries that rank": lambda rank: other_state(one_entry_less),
    "near mode: the optimizer's": lambda rank: said_by_near_mode(
        lambda loop: loop.optimizer.param_groups[0].update(lr=loop.optimizer.param_groups[0]["lr"] * 2)
    ),
    "near mode: gradients were made larger": lambda rank: said_by_near_mode(grown),
    "log: the writer failed": lambda rank: failing_writer(),
    "would round": other_rates,
    "has no more inputs": joined,
    "has … and rank": other_version,
    "could not connect": unreachable,
    "ranks disagree": disagreeing,
    "the exchange stopped at an earlier error": again,
    "Replicas no longer agree": flipped,
    "closed its connections": gone,
    "it is dead, stopped": silent,
    "did not answer in time": late,
    "did not attach within": absent,
}


def provoke(rank: int) -> dict[str, list[str]]:
    """All that was raised or warned of, by the words that name the case."""
    said: dict[str, list[str]] = {}
    for words, case in ON_RANKS.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                case(rank)
                raised = []
            except Exception as error:
                raised = [str(error)]
        said[words] = [*raised, *(str(one.message) for one in caught)]
        dist.barrier()
    return said


@pytest.fixture(scope="module")
def on_ranks() -> list[dict[str, list[str]]]:
    return run_ranks(2, provoke, deadline=300)


# -- what takes none --------------------------------------------------------------------------------------------------


def no_package(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setitem(sys.modules, "zstandard", None)
    parse("zstd").encode(torch.zeros(8))


def no_namespaces(patch: pytest.MonkeyPatch, folder: Path) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "unshare: Operation not permitted")
    patch.setattr(launch.subprocess, "run", lambda *_, **__: failed)
    launch._namespaces({"unshare": "unshare"})


def old_library(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setenv("GRADZIP_LIBRARY", _ctypes.__file__)  # any library but ours
    patch.delitem(sys.modules, "gradzip.engines.native")
    engines.load("native")


def no_library(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setitem(sys.modules, "gradzip.engines.native", None)
    engines.load("native")


def empty_run(patch: pytest.MonkeyPatch, folder: Path) -> None:
    (folder / "run.jsonl").write_text("\n")
    report.read([folder / "run.jsonl"])


def empty_trace(patch: pytest.MonkeyPatch, folder: Path) -> None:
    (folder / "trace.json").write_text('{"traceEvents": []}')
    measured(folder / "trace.json")


def no_streams(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setattr(on_stream, "reason_against", lambda group, device: "this is an old torch")
    ways = {"weight": Way(parse("noise"), "alltoall", False, None)}
    group: Any = None
    runners.choose(ways, {"weight": torch.float32}, torch.device("cuda", 0), group)


ALONE: dict[str, Callable[[pytest.MonkeyPatch, Path], object]] = {
    "attach needs a DistributedDataParallel model": lambda patch, folder: gradzip.attach(nn.Linear(2, 2)),  # type: ignore[arg-type]
    "unknown codec": lambda patch, folder: parse("gzip"),
    "codec needs one package more": no_package,
    "cannot emulate hosts": no_namespaces,
    "was built from another version": old_library,
    "engine cannot run here": no_library,
    "streams alone carry it there": no_streams,
    "holds no run": empty_run,
    "holds no range of gradzip": empty_trace,
}


def case_of(message: str) -> str:
    (words,) = [words for words in (*ON_RANKS, *ALONE) if words in message]
    return words


@pytest.mark.timeout(320)
@pytest.mark.parametrize("message", MESSAGES)
def test_a_listed_message_is_raised(
    message: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = case_of(message)
    if words in ON_RANKS:
        said = request.getfixturevalue("on_ranks")[0][words]  # what rank 0 saw
        assert any(pattern(message).search(text) for text in said), said
    else:
        with pytest.raises(gradzip.GradzipError, match=pattern(message)):
            ALONE[words](monkeypatch, tmp_path)


def test_nothing_is_provoked_that_the_page_does_not_list() -> None:
    assert {case_of(message) for message in MESSAGES} == {*ON_RANKS, *ALONE}
