"""Exchanges that a carrier takes: one order on all ranks whatever the timing, exact sizes, and the same bits as Gloo's.

What stands in for NCCL (fake_nccl.py) matches messages by their order alone and refuses sizes that differ.
"""

from __future__ import annotations

import os
import random
import threading
import time
from datetime import timedelta
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from exchanges import CODECS, HOSTS, LOCAL, Exchanger, covering, fits, whole_numbers
from ranks import TIMEOUT, run_ranks
from torch import nn

from gradzip import Unsupported, parse
from gradzip.collectives import PipelineChannel, channel, open_channel, transports
from gradzip.collectives.carrier import Carrier
from gradzip.errors import PeerError
from gradzip.exchange.peers import channel as connections
from gradzip.exchange.peers.buffers import Buffers
from gradzip.exchange.peers.gloo import Broken, Rows
from gradzip.feedback import Memory
from gradzip.routes import NAMED, Route, tree

WORLD = HOSTS * LOCAL


def connected(transport: str, device: torch.device) -> PipelineChannel:
    os.environ["LOCAL_WORLD_SIZE"] = str(LOCAL if dist.get_world_size() == WORLD else 1)
    assert dist.group.WORLD is not None
    return open_channel(dist.group.WORLD, device, timeout=TIMEOUT, transport=transport)


def both_ways(device: torch.device, rounds: int) -> list[str]:
    """Random tensors by random codecs and routes, over Gloo and by the carrier; what came out differently."""
    ways = [Exchanger(connected(transport, device), by_collectives=True) for transport in ("gloo", "nccl")]
    choose, differing, rank = random.Random(3), list[str](), dist.get_rank()
    for number in range(rounds):
        codec = choose.choice(CODECS)
        routes = [None, *(name for name in NAMED if fits(codec, name))] if parse(codec).rounds == 1 else [None]
        route = choose.choice(routes)
        sizes = [choose.choice([0, 1, 3, 40, 1000, 5000]) for _ in range(choose.randint(1, 40))]
        draw = torch.Generator().manual_seed(1000 * number + rank)
        sent = {f"t{i}-{size}": torch.randn(size, 1, generator=draw).to(device) for i, size in enumerate(sizes) if size}
        if not sent:
            continue
        results = []
        for exchanger in ways:
            tensors = {name: value.clone() for name, value in sent.items()}
            for start in range(0, len(tensors), 7):  # several messages at once
                exchanger.send(codec, route, dict(list(tensors.items())[start : start + 7]))
            exchanger.finish()
            results.append(torch.cat([x.view(-1) for x in tensors.values()]).view(torch.int32))
        summed_by_torch = codec.startswith("cast") and route == "allreduce"  # each library in its own order
        if not summed_by_torch and not torch.equal(*results):
            differing.append(f"{number}: {codec} by {route}")
    return differing


def wrong_means(device: torch.device, routes: list[str], numel: int) -> list[str]:
    """Those routes whose result is not exactly the mean."""
    exchanger, rank = Exchanger(connected("nccl", device), by_collectives=True), dist.get_rank()
    mean = torch.stack([whole_numbers(numel, r) for r in range(dist.get_world_size())]).mean(0)
    sent = {name: whole_numbers(numel, rank).to(device) for name in routes}
    for name, values in sent.items():  # all of them at once
        exchanger.send("gcomp:mode=lossless" if Route.parse(name).compresses else "identity", name, {name: values})
    exchanger.finish()
    return [name for name, values in sent.items() if not torch.equal(values.cpu(), mean)]


def carried(rank: int) -> dict[str, Any]:
    import fake_nccl

    fake_nccl.stand_in()
    late, seen = random.Random(rank), list[str]()
    plainly = fake_nccl.Ordered.exchange

    def noted(self: Any, into: Any, out: Any) -> Any:
        seen.append(threading.current_thread().name)
        return plainly(self, into, out)

    def probe(kind: str, stage: int, number: int) -> None:
        time.sleep(late.random() * 0.002)

    fake_nccl.Ordered.exchange = noted  # type: ignore[method-assign]
    fake_nccl.longest = 0.003
    connections._probe = probe
    device = torch.device("cpu")
    routes = [str(route) for route in covering(list(tree()))[:8]] + list(NAMED)
    return {"wrong": wrong_means(device, routes, 1003), "differing": both_ways(device, 6), "by": set(seen)}


def test_what_is_carried_is_the_same() -> None:
    for found in run_ranks(WORLD, carried):
        assert found["wrong"] == []
        assert found["differing"] == []
        assert found["by"] == {"gradzip-carry"}, "one thread issues all"


def test_rank_0_is_the_last_to_be_ready() -> None:
    """What others have long said to be ready for begins at once, though nobody has anything more to say."""
    said, issued = SimpleQueue[int](), list[str]()

    def started(name: str) -> Any:
        return lambda *_: issued.append(name) or (lambda: True)

    gloo: Any = SimpleNamespace(rank=0, world=2, send_row=lambda *_: Rows(), receive_from_any=lambda tag: said.get())
    communicator: Any = SimpleNamespace(
        device=torch.device("cpu"), sum=started("sum"), close=lambda: None, sums=lambda dtype: True
    )
    carrier = Carrier(gloo, communicator, timedelta(seconds=30), failed=lambda error: None, least=0)
    early, late = torch.zeros(1), torch.zeros(1)
    said.put(2)
    first = carrier.begin_sum(1, early)  # rank 1 is ready for another one
    while said.qsize():
        time.sleep(0.001)
    second = carrier.begin_sum(2, late)
    assert second.issued.wait(30), "it waits until rank 1 says something more"
    assert not first.issued.is_set()
    said.put(1)
    assert first.issued.wait(30)
    assert carrier.close(30)


def unlike(rank: int) -> list[str]:
    import fake_nccl

    fake_nccl.stand_in()
    said = []
    for transport, device in (("nccl" if rank else "gloo", "cpu"), ("gloo", "meta" if rank else "cpu")):
        with pytest.raises(PeerError) as caught:
            connected(transport, torch.device(device))
        said.append(str(caught.value))
    return said


def test_ranks_that_choose_differently_are_told() -> None:
    for of_transports, of_devices in run_ranks(2, unlike):
        assert '"transport": "gloo"' in of_transports
        assert '"transport": "nccl"' in of_transports
        assert '"device": "cpu"' in of_devices
        assert '"device": "meta"' in of_devices, "any other kind"


def test_a_communicator_that_comes_too_late_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows of it any more, and what it waits for on the GPU would hold that up for ever."""
    awaited, aborted = threading.Event(), threading.Event()

    def late(*_: Any) -> Any:
        awaited.wait(30)
        return SimpleNamespace(abort=aborted.set)

    monkeypatch.setattr(channel, "_make_communicator", late)
    with pytest.raises(PeerError, match="did not meet over NCCL within 0:00:00"):
        PipelineChannel._communicator(lonely(), timedelta(seconds=0.1))  # type: ignore[arg-type]
    awaited.set()
    assert aborted.wait(30)


def test_nccl_that_cannot_connect_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any) -> Any:
        raise Broken(None, RuntimeError("ncclCommInitRank: invalid usage"))

    monkeypatch.setattr(channel, "_make_communicator", refuses)
    with pytest.raises(PeerError, match=r"rank 0 .* over NCCL \(ncclCommInitRank: invalid.*GRADZIP_TRANSPORT=gloo"):
        PipelineChannel._communicator(lonely(), timedelta(seconds=30))  # type: ignore[arg-type]


def lonely() -> Any:
    """As much of a channel as it takes to make a communicator; nobody has left word of anything."""
    health = SimpleNamespace(cause=lambda patience: None)
    return SimpleNamespace(
        rank=0, world=2, _store=None, device=torch.device("cpu"), error=None, health=health, fail=lambda e: e
    )


def test_nccl_is_refused_where_it_cannot_work(monkeypatch: pytest.MonkeyPatch) -> None:
    group: Any = None
    with pytest.raises(Unsupported, match=r"the gradients are on cpu.*GRADZIP_TRANSPORT=gloo"):
        transports.choose("nccl", group, torch.device("cpu"))
    with pytest.raises(Unsupported, match=r"'ncl'.*nccl"):
        transports.choose("ncl", group, torch.device("cpu"))
    assert transports.choose(None, group, torch.device("cpu")) == "gloo"
    monkeypatch.setenv("GRADZIP_TRANSPORT", "gloo")
    assert transports.choose("nccl", group, torch.device("cpu")) == "gloo", "the environment has the last word"


def test_nccl_is_refused_beside_what_sums_during_backward() -> None:
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    transports.check_model(model)
    model.find_unused_parameters = model.static_graph = True  # as DDP has them
    transports.check_model(model)
    model.static_graph = False
    with pytest.raises(Unsupported, match=r"find_unused_parameters.*GRADZIP_TRANSPORT=gloo"):
        transports.check_model(model)
    with pytest.raises(Unsupported, match=r"SyncBatchNorm \('1' and 0 more\).*GRADZIP_TRANSPORT=gloo"):
        transports.check_model(nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2)))


# --- on a GPU --------------------------------------------------------------------------------------------------------


def carried_by_nccl(rank: int) -> dict[str, Any]:
    channel._least = 0
    device = torch.device("cuda", rank % torch.cuda.device_count())
    routes = [str(route) for route in covering(list(tree()))[:24]] + [str(NAMED[name].on("gpu")) for name in NAMED]
    return {"wrong": wrong_means(device, routes, 100_003), "differing": both_ways(device, 20)}


@pytest.mark.gpu
def test_what_nccl_carries_is_the_same() -> None:
    for found in run_ranks(WORLD, carried_by_nccl, backend="nccl"):
        assert found["wrong"] == []
        assert found["differing"] == []


def lost_on_a_gpu(rank: int) -> list[str]:
    """Residuals that are others where the GPU is slow to read what was lost."""
    device, found = torch.device("cuda", rank % torch.cuda.device_count()), list[dict[str, torch.Tensor]]()
    plainly = Memory.lost

    def late(*args: Any, **options: Any) -> None:
        torch.cuda._sleep(1 << 24)
        plainly(*args, **options)

    for lost in (plainly, late):
        Memory.lost = lost  # type: ignore[method-assign,assignment]
        exchanger = Exchanger(connected("gloo", device))
        for i in range(24):  # at once: their memory comes from one pool
            values = torch.randn(1 << 16, 1, generator=torch.Generator().manual_seed(10 * i + rank)).to(device)
            exchanger.send("sign", None, {f"t{i}": values})
        exchanger.finish()
        found.append({key: residual.cpu() for key, residual in exchanger.memory._residuals.items()})
    in_time, too_late = found
    assert len(in_time) == len(too_late) == 24
    return [key for key in in_time if not torch.equal(in_time[key], too_late[key])]


@pytest.mark.gpu
def test_what_was_lost_is_read_before_its_memory_is_used_again() -> None:
    """One stage's stream made it, and the last stage's reads it."""
    assert run_ranks(2, lost_on_a_gpu, backend="nccl") == [[], []]


@pytest.mark.gpu
def test_buffers_on_a_gpu_are_free_when_they_are_taken() -> None:
    """Torch hands memory out while kernels of its stream still use it, and a carrier uses it on another stream."""
    device, size = torch.device("cuda", 0), 32 << 20
    used = torch.zeros(size, dtype=torch.uint8, device=device)
    torch.cuda._sleep(1 << 28)
    used.fill_(1)
    del used  # before it is filled
    taken = Buffers(device=device).take(size)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        taken.fill_(7)
    torch.cuda.synchronize()
    assert bool((taken == 7).all())
