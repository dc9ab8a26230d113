"""After a plan is attached: stats compare it with what happens, a changed network is told, and traces show both."""

from __future__ import annotations

import itertools
import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import TIMEOUT, run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradzip
from gradzip.errors import PlanError
from gradzip.exchange.coding import RAW, Message, Values
from gradzip.exchange.compiler import compile_route
from gradzip.exchange.on_host.rows import Row, RowExchange
from gradzip.exchange.on_host.runner import HostProgram, HostRunner
from gradzip.exchange.peers.buffers import Buffers
from gradzip.exchange.peers.gloo import Pending, Rows
from gradzip.exchange.recording import Watch
from gradzip.exchange.topology import Topology
from gradzip.hooks.progress import SETTLING, WINDOW, Progress
from gradzip.option import Option
from gradzip.plan import Plan
from gradzip.routes import NAMED

PLANNED = 1e9  # bit/s
LONG = TIMEOUT.total_seconds()


def said(rates: list[float], expected: float = PLANNED) -> list[str]:
    """What is said over steps of 0.1 s, half of each on the wire, at these rates."""
    progress, words = Progress({"step_s": 0.1, "bits_per_s": expected}), []
    for number, rate in enumerate([rates[0]] * SETTLING + rates, 1):
        word = progress.step(0.1 * number, 0.05 * number, int(rate * 0.05 / 8), 0.01)
        words += [word] if word else []
    return words


def test_noise_is_not_a_change() -> None:
    noisy = [PLANNED * (0.5 if i % 3 == 0 else 1.4 if i % 3 == 1 else 1.0) for i in range(10 * WINDOW)]
    assert said(noisy) == []
    one_bad_window = [PLANNED] * WINDOW + [PLANNED / 5] * WINDOW + [PLANNED] * 3 * WINDOW
    assert said(one_bad_window) == []


@pytest.mark.parametrize("factor", [0.3, 3.0])
def test_a_network_that_changes_is_told_once(factor: float) -> None:
    (word,) = said([PLANNED] * 2 * WINDOW + [factor * PLANNED] * 6 * WINDOW)
    assert f"carries {factor * 1000:.0f} Mbit/s" in word
    assert "1000 was at first: plan again" in word


def test_a_plan_for_another_network_is_told() -> None:
    (word,) = said([PLANNED / 4] * 4 * WINDOW)
    assert "1000 was planned for" in word
    assert said([PLANNED / 2] * 4 * WINDOW) == [], "ranks wait for each other: half of it is no other network"


def test_what_was_predicted_is_beside_what_is_measured() -> None:
    progress = Progress({"step_s": 0.2, "uncertainty": 0.1})
    assert progress.compared() == {}
    for number in range(20):
        progress.step(0.1 * number, 0.0, 0, 0.0)
    assert progress.compared() == {"step_s": {"predicted": 0.2, "measured": pytest.approx(0.1)}}


def test_the_wire_is_counted_once_while_exchanges_overlap() -> None:
    seen: list[str] = []
    watch = Watch(lambda kind, stage, number: seen.append(kind))
    watch.saw("start", 0, 1)
    assert watch.wire_seconds() > 0
    watch.record()
    watch.saw("start", 0, 2, "message 2")
    watch.saw("code", 1, 1)
    watch.saw("coded", 1, 1)
    watch.saw("code", 1, 2)
    watch.saw("coded", 1, 2)
    total = watch.wire_seconds()
    assert watch.wire_seconds() == total, "nothing is under way any more"
    moments = watch.recorded()
    assert [m.track for m in moments] == ["wire, stage 0", "coding, stage 1"] * 2
    assert moments[2].name == "chunk 2: message 2"
    first, second = moments[0], moments[2]
    assert total <= second.end - first.begin + 1e-9
    assert total >= max(m.end - m.begin for m in (first, second)) - 1e-9
    watch.saw("start", 0, 3)
    watch.saw("code", 1, 3)
    assert watch.recorded() == [], "nobody records any more"
    assert seen[:2] == ["start", "start"]


class LatePeer:
    """Stands in for Gloo: the other rank takes data at once and sends the same, and agrees when it is told to."""

    rank, world = 0, 2

    def __init__(self) -> None:
        self.sent, self.there = threading.Event(), threading.Event()

    def send_row(self, row: torch.Tensor, *_: Any) -> Rows:
        assert self.sent.wait(LONG)
        assert self.there.wait(LONG)
        rows = Rows()
        rows.received[1] = row
        return rows

    def send(self, parts: Any, into: Any, tag: int) -> Pending:
        for (_, data), (_, buffer) in zip(parts, into, strict=True):
            buffer[: data.numel()] = data
        self.sent.set()
        return Pending()


def channel_to(peer: LatePeer, seen: list[tuple[str, int]]) -> Any:
    """As much of a channel as a runner needs."""

    def fails(error: Any) -> Any:
        raise AssertionError(error)

    topology = Topology(0, ((0,), (1,)))
    watch = Watch(lambda kind, stage, number: seen.append((kind, stage)))
    about = {"gloo": peer, "watch": watch, "buffers": Buffers(), "explained": fails, "error": None, "rank": 0}
    return SimpleNamespace(topology=topology, groups=topology.groups(), device=torch.device("cpu"), world=2, **about)


def prepared(channel: Any) -> HostProgram:
    args = RAW.text, NAMED["alltoall"], ("x",), (256,), torch.float32, channel.topology
    return HostProgram(compile_route(*args), RAW)


def test_a_rank_that_comes_late_is_not_taken_for_a_slow_network() -> None:
    """What is sent before all agree is under way from then on."""
    peer, seen, ended = LatePeer(), list[tuple[str, int]](), threading.Event()
    channel = channel_to(peer, seen)
    runner, rows, row = HostRunner(channel), RowExchange(channel), Row("a message", lambda error: None)
    rows.submit(row)
    values, message = Values([torch.ones(256)]), Message(("x",), torch.float32, 0, 2)
    how = {"agreed": row.over.wait, "when_agreed": row.then}
    runner.submit(prepared(channel), values, message, lambda outcome: ended.set(), **how)  # type: ignore[arg-type]
    assert peer.sent.wait(LONG)
    assert ("start", 0) not in seen
    peer.there.set()
    assert ended.wait(LONG)
    assert runner.stop(LONG)
    assert rows.stop(LONG)
    order = [event for event in seen if event != ("agree", 0)]
    assert order == [
        *(("code", 0), ("coded", 0), ("start", 0)),
        *(("code", 1), ("coded", 1), ("start", 1)),
        *(("code", 2), ("coded", 2)),
    ]


def test_what_is_still_coded_ends_when_threads_are_told_to_stop() -> None:
    coding, ended = threading.Event(), list[BaseException | None]()
    channel = channel_to(LatePeer(), [])
    runner, values, message = HostRunner(channel), Values([torch.ones(256)]), Message(("x",), torch.float32, 0, 2)

    def begin() -> None:
        assert coding.wait(LONG)

    runner.submit(prepared(channel), values, message, lambda outcome: ended.append(outcome.error), begin)
    assert not runner.stop(0.01)
    coding.set()
    assert runner.stop(LONG)
    assert ended == [None]


def _plan(model: DistributedDataParallel) -> Plan:
    shapes = {name: tuple(p.shape) for name, p in model.module.named_parameters()}
    options = {name: Option("gcomp:mode=lossless", None, "alltoall") for name in shapes}
    timeline = [("inter.out", "a2a.flat 0.weight", 0.001, 0.002), ("compute", "backward", 0.0, 0.001)]
    return Plan(options, shapes, "net", 25, {"step_s": 0.01, "exposed_s": 0.001, "bits_per_s": 1e9}, timeline)


def _train(rank: int, folder: str) -> dict[str, Any]:
    torch.manual_seed(3)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    handle = gradzip.attach(model, optimizer, _plan(model), timeout=TIMEOUT)
    with pytest.raises(gradzip.Unsupported, match="at least one step"):
        handle.trace("x", steps=0)
    if rank == 0:
        handle.trace(Path(folder) / "trace.json", steps=2)
    for step in range(8):
        rng = torch.Generator().manual_seed(step * 2 + rank)
        optimizer.zero_grad()
        model(torch.randn(4, 64, generator=rng)).square().mean().backward()
        optimizer.step()
    compared = handle.stats()["prediction"]
    handle.detach()
    dist.barrier()
    return compared


def test_a_trace_has_prediction_and_measurement_side_by_side(tmp_path: Path) -> None:
    compared, _ = run_ranks(2, _train, str(tmp_path))
    assert compared["step_s"]["predicted"] == 0.01
    assert compared["step_s"]["measured"] > 0
    assert compared["bits_per_s"]["measured"] > 0
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert list(processes.values()) == ["predicted", "measured, step 1", "measured, step 2"]
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {name for (pid, _), name in tracks.items() if pid == 1} == {"inter.out", "compute"}
    wanted = {"compute", "exposed", *(f"{what}, stage {n}" for what in ("coding", "wire") for n in range(2))}
    for number in (2, 3):
        assert {name for (pid, _), name in tracks.items() if pid == number} == wanted | {"coding, stage 2"}
    spans = [e for e in events if e["ph"] == "X"]
    assert all(set(e) >= {"name", "ts", "dur", "pid", "tid"} and e["dur"] >= 0 for e in spans)
    assert {(e["pid"], e["tid"]) for e in spans} == set(tracks)
    step = {tracks[e["pid"], e["tid"]]: e for e in spans if e["pid"] == 2}
    ends = step["exposed"]["ts"] + step["exposed"]["dur"]
    order = ["coding, stage 0", "wire, stage 0", "coding, stage 1", "wire, stage 1", "coding, stage 2"]
    for before, after in itertools.pairwise(order):
        assert step[before]["ts"] + step[before]["dur"] <= step[after]["ts"] + 1
    assert 0 <= step[order[0]]["ts"] <= step[order[-1]]["ts"] <= ends
    assert "gcomp:mode=lossless" in step["wire, stage 1"]["name"]


@pytest.mark.parametrize("entry", [["gpu", "x", 2.0, 1.0], ["gpu", "x", 0.0], "gpu", ["gpu", 1, 0.0, 1.0]])
def test_a_plan_with_a_broken_timeline_is_refused(entry: object) -> None:
    data = Plan({"a": Option("cast", None, "alltoall")}, {"a": (3,)}).to_json()
    assert Plan.from_json({**data, "timeline": [["gpu", "x", 0.0, 1]]}).timeline == (("gpu", "x", 0.0, 1.0),)
    with pytest.raises(PlanError, match="timeline holds"):
        Plan.from_json({**data, "timeline": [entry]})
