"""Times of what runs on streams: exposed time, traces and a plan's promises, read when steps are long over."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import streams
import torch
from ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradzip
from gradzip import Option, Plan
from gradzip.exchange.on_stream import runner, times
from gradzip.exchange.on_stream.times import ALL_TO_ALL, ENCODE, Times
from gradzip.exchange.program import Program
from gradzip.exchange.recording import Moment
from gradzip.routes import NAMED

MESSAGES = 2  # buckets of the model below
STAGES = ["encode", "all-to-all", "add", "all-gather", "decode"]


class Event:
    """Is through when it is released; nobody may wait for it before."""

    clock = 0.0
    made: ClassVar[list[Event]] = []
    released = True

    def __init__(self) -> None:
        self.made.append(self)

    def record(self, stream: object) -> None:
        Event.clock += 1.0
        self.at = Event.clock

    def query(self) -> bool:
        return Event.released

    def synchronize(self) -> None:
        assert Event.released, "the host would wait for the GPU"

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end.at - self.at)


def task(policy: Any) -> tuple[gradzip.Handle, Callable[[int], None]]:
    torch.manual_seed(3)
    layers = [nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.03)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    handle = gradzip.attach(model, optimizer, policy(model) if callable(policy) else policy)

    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(4, 64)).square().mean().backward()
            optimizer.step()

    return handle, train


def asked(rank: int) -> list[Any]:
    streams.install()
    times._event = lambda device: Event()
    handle, train = task("noise")
    assert handle._stream is not None
    train(4)
    before = len(Event.made)
    nothing = handle.stats()["exposed_seconds"]
    train(3)
    exposed = len(Event.made)
    first = handle.stats()["exposed_seconds"]
    Event.released = False  # the GPU is so far behind that nothing is through
    train(4)
    hanging = handle._exposed
    Event.released = True
    return [before, nothing, exposed, first, hanging, handle.stats()["exposed_seconds"]]


def test_plain_steps_record_nothing_and_nobody_waits() -> None:
    for before, nothing, exposed, first, hanging, last in run_ranks(2, asked):
        assert (before, nothing) == (0, 0.0)
        assert exposed <= 2 * 4, "two events a step, and they are used again"
        assert first == 3.0, "a second from the last bucket to its means, by that clock, in each of three steps"
        assert hanging == first
        assert last == 7.0


def _plan(model: DistributedDataParallel) -> Plan:
    shapes = {name: tuple(p.shape) for name, p in model.module.named_parameters()}
    timeline = [("inter.out", "a2a.flat 0.weight", 0.001, 0.002), ("compute", "backward", 0.0, 0.001)]
    promised = {"step_s": 0.01, "exposed_s": 0.001, "bits_per_s": 1e9}
    return Plan({name: Option("noise", None, "alltoall") for name in shapes}, shapes, "net", 25, promised, timeline)


def traced(rank: int, folder: str, enough: int) -> dict[str, Any]:
    streams.install()
    runner.ENOUGH = enough
    handle, train = task(_plan)
    with pytest.raises(gradzip.Unsupported, match="at least one step"):
        handle.trace("x", steps=0)
    train(1)
    if rank == 0:
        handle.trace(Path(folder) / "trace.json", steps=2)
    train(6)
    is_there = (Path(folder) / "trace.json").exists()
    stats = handle.stats()
    handle.detach()
    return stats | {"written": is_there}


def ended(e: dict[str, Any]) -> float:
    return float(e["ts"] + e["dur"]) - 1e-3  # times are rounded to 1e-9 us


@pytest.mark.parametrize(("enough", "collectives"), [(1, MESSAGES), (1 << 30, 1)])
def test_a_trace_has_prediction_and_streams_side_by_side(tmp_path: Path, enough: int, collectives: int) -> None:
    """`enough`: bytes of buckets before they are exchanged."""
    found, other = run_ranks(2, traced, str(tmp_path), enough)
    assert found["written"], "two steps after those that were traced"
    assert found["exposed_seconds"] > 0 < other["exposed_seconds"]
    for stats in (found, other):
        said = stats["prediction"]
        assert said["step_s"]["predicted"] == 0.01
        assert said["exposed_s"]["measured"] > 0
        assert said["step_s"]["measured"] > said["exposed_s"]["measured"]
        assert said["bits_per_s"]["measured"] > 0
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert list(processes.values()) == ["predicted", "measured, step 2", "measured, step 3"]
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans = [(tracks[e["pid"], e["tid"]], e) for e in events if e["ph"] == "X"]
    for number in (2, 3):
        here = [(track, e) for track, e in spans if e["pid"] == number]
        assert {track for track, _ in here} == {"compute", "exposed", *STAGES}
        (exposed,) = (e for track, e in here if track == "exposed")
        compute = {e["name"]: e for track, e in here if track == "compute"}
        assert compute["backward"]["dur"] > 0 == compute["backward"]["ts"] < compute["forward"]["dur"]
        assert exposed["ts"] == pytest.approx(compute["backward"]["dur"])
        stages = {name: [e for track, e in here if track == name] for name in STAGES}
        assert [len(stages[name]) for name in ("encode", "add", "decode")] == [MESSAGES] * 3
        wires = stages["all-to-all"] + stages["all-gather"]
        assert len(stages["all-to-all"]) == len(stages["all-gather"]) == collectives
        assert all(e["dur"] >= 0 for _, e in here)
        for before, after in itertools.pairwise(sorted(wires, key=lambda e: e["ts"])):
            assert after["ts"] >= ended(before), "a group carries one collective at a time"
        for name, message in ((e["name"], e) for e in stages["encode"]):
            add, decode = (next(e for e in stages[what] if e["name"] == name) for what in ("add", "decode"))
            one = min((e for e in stages["all-to-all"] if e["ts"] >= ended(message)), key=lambda e: e["ts"])
            two = min((e for e in stages["all-gather"] if e["ts"] >= ended(add)), key=lambda e: e["ts"])
            assert add["ts"] >= ended(one)
            assert decode["ts"] >= ended(two)


def traced_factors(rank: int, folder: str) -> None:
    streams.install()
    handle, train = task("powersgd:rank=2")
    handle.trace(Path(folder) / f"{rank}.json", steps=1)
    train(1)
    handle.detach()


def test_factors_are_traced_and_detach_writes_what_is_known(tmp_path: Path) -> None:
    run_ranks(2, traced_factors, str(tmp_path))
    events = json.loads((tmp_path / "1.json").read_text())["traceEvents"]
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert set(tracks.values()) == {"compute", "exposed", "factors", "all-reduce"}
    (factors,) = (e for e in events if e["ph"] == "X" and tracks[e["tid"]] == "factors")
    carried = [e for e in events if e["ph"] == "X" and tracks[e["tid"]] == "all-reduce"]
    assert len(carried) == 3
    for e in carried:
        assert e["name"] == factors["name"]
        assert factors["ts"] <= e["ts"] <= e["ts"] + e["dur"] <= factors["ts"] + factors["dur"]


class Carried:
    def wait(self) -> None:
        pass


def test_collectives_are_shown_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two that are enqueued together begins when the first is through; nothing else is moved."""
    monkeypatch.setattr(times, "_event", lambda device: Event())
    clock = Times(torch.device("cpu"), lambda stream: None, None)
    clock.wants_stages = True
    clock.trace(1)
    clock.forward_begins()
    clock.forward_ends()
    clock.begin(5)
    program = Program("noise", NAMED["alltoall"], ("w", "b"), (4, 2), torch.float32, ((0, 1),), (), ())
    first, second = clock.of(program), clock.of(program)
    for stages in (first, second):
        stages.start()
        stages.stop(ENCODE)
    work: Any = Carried()
    first.carried(ALL_TO_ALL, work)
    second.carried(ALL_TO_ALL, work)
    clock.arrived()
    clock.done()
    (known,) = clock.read(5)
    assert known.exposed == 1.0
    assert known.wire == 3.0 + 1.0
    name = "noise of 'w' and 1 more"
    assert known.moments == [
        Moment("compute", "forward", -1.0, 0.0),
        Moment("compute", "backward", 0.0, 7.0),
        Moment("exposed", "exchange that backward does not hide", 7.0, 8.0),
        Moment(ENCODE, name, 1.0, 2.0),
        Moment(ENCODE, name, 3.0, 4.0),
        Moment(ALL_TO_ALL, name, 2.0, 5.0),
        Moment(ALL_TO_ALL, name, 5.0, 6.0),
    ]
    assert clock.read() == []
