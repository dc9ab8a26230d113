"""What an exchange of gradients takes on this network by the host runner, in the manner of nccl-tests.

Every rank's gradient is the sample times a random factor of its own per value, so that sums are sums of different
numbers. Each way is verified before it is timed: all replicas must have the same bits, and no value may be further from
the mean in float64 than the codec promises. Then all ways take turns, native all-reduces among them, and the median of
the rounds counts, each as slow as its slowest rank.
"""

from __future__ import annotations

import functools
import platform
import socket
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from .. import engines, wire
from ..capture import Snapshot
from ..codecs import Codec, Context, parse
from ..codecs.baseline import Cast
from ..codecs.gcomp import GComp
from ..engines.layout import EXACT, Floor
from ..errors import GradzipError, Unsupported
from ..exchange import coding, rounds
from ..exchange.comparisons import bit_sum
from ..exchange.message_codecs import codes_messages, places_of, route_of
from ..exchange.on_host.rounds import submit_rounds
from ..exchange.on_host.runner import HostMessage, runner_of
from ..exchange.outcome import Outcome
from ..exchange.peers.channel import open_channel
from ..feedback import Memory
from ..option import Option
from ..routes import NAMED
from .sample import Sample

ROUNDS = 7
NATIVE = ("native fp32", "native bf16")
_PAIR_BYTES = 4 << 20


@dataclass(frozen=True)
class Result:
    """One row of `gradzip bench net`. GB are 1e9 bytes; `bytes` those of the float32 gradient."""

    codec: str
    route: str
    bytes: int
    ranks: int
    hosts: int
    milliseconds: float
    spread: float  # milliseconds between the fastest and the slowest round
    algorithm_gbps: float  # bytes / time
    bus_gbps: float  # what a rank sent / time
    effective_gbps: float  # what a rank would have sent in an uncompressed ring / time
    sent: int  # bytes by the rank that sent most
    host_sent: int  # bytes by the host that sent most to others
    ratio: float  # what a host would have sent to others in an uncompressed ring / host_sent
    wrong: int | None  # values further off than promised; None: nothing is promised
    speedup: float  # native float32 all-reduce of the same rounds / time
    of_ideal: float  # time / (native time / ratio)


_Start = Callable[[int, Callable[[Outcome], None]], None]


class WrongResult(GradzipError):
    """An exchange did not give what it should: it is not timed."""


@dataclass
class _Way:
    """One way to average the gradient in `result`."""

    name: str
    route: str
    run: Callable[[], None]
    codec: Codec | None = None
    floor: Floor | torch.Tensor | None = None
    last: Outcome | None = None
    wrong: int | None = None


class Bench:
    """Measures on all ranks of a group; results are the same on all ranks."""

    def __init__(self, sample: Sample, device: torch.device) -> None:
        world = dist.group.WORLD
        assert world is not None
        self.channel = open_channel(world, device)
        self._sample = sample
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        rng = torch.Generator().manual_seed(1000 + self._rank)
        factor = torch.rand(sample.values.numel(), generator=rng).add_(0.5)
        self.own = (sample.values * factor).to(device)
        self.result = torch.empty_like(self.own)
        self._reference()

    def measure(self, options: Sequence[str | Option], rounds: int = ROUNDS) -> list[Result]:
        ways = self._native()
        ways += [self._way(Option.parse(option)) for option in options]
        for way in ways:
            self._verify(way)
        times: list[list[float]] = [[] for _ in ways]
        for _ in range(rounds):
            for way, seen in zip(ways, times):
                seen.append(self._time(way))
        slowest = torch.tensor(times, dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        native = statistics.median(slowest[0].tolist())
        return [self._row(way, row.tolist(), native) for way, row in zip(ways, slowest)]

    def average(self, option: Option) -> None:
        """Puts the mean of all ranks' gradients into `result`, untimed and unverified."""
        way = self._way(option)
        self.result.copy_(self.own)
        way.run()
        self._synchronize()

    # -- ways ---------------------------------------------------------------------------------------------------

    def _native(self) -> list[_Way]:
        half = torch.empty(self.own.numel(), dtype=torch.bfloat16, device=self.own.device)

        def bf16() -> None:
            half.copy_(self.result)
            dist.all_reduce(half)
            self.result.copy_(half).div_(self._world)

        def fp32() -> None:
            dist.all_reduce(self.result)
            self.result.div_(self._world)

        return [_Way(NATIVE[0], "native", fp32), _Way(NATIVE[1], "native", bf16, Cast())]

    def _way(self, option: Option) -> _Way:
        codec = parse(option.codec)
        route = route_of(codec, option.route, self.channel.topology.default_route)
        place = option.device or ("gpu" if self.own.device.type == "cuda" else "cpu")
        label = route
        if place == "gpu" and route in NAMED and NAMED[route].compresses:
            route = str(NAMED[route].on("gpu"))
        floor = self._sample.floor(codec)
        floor = None if floor is None else _on(floor, self.own.device)
        memory, step = Memory(self._rank), 0
        way = _Way(str(codec), label, lambda: None, codec, floor)
        start = self._start(codec, route, memory, floor)

        def run() -> None:
            nonlocal step
            done, ended = threading.Event(), list[Outcome]()

            def end(outcome: Outcome) -> None:
                ended.append(outcome)
                done.set()

            start(step, end)
            done.wait()
            memory.commit()
            step += 1
            way.last = ended[0]
            if ended[0].error is not None:
                raise ended[0].error

        way.run = run
        return way

    def _start(self, codec: Codec, route: str, memory: Memory, floor: Floor | torch.Tensor | None) -> _Start:
        """How the host runner begins to send the gradient."""
        messages = self._codec_of_messages(codec, route)
        if messages is None:
            return functools.partial(self._in_rounds, codec, memory)
        message = HostMessage(messages, route, ["gradient"], [self.result])
        program, runner = message.program(self.channel.topology), runner_of(self.channel)

        def start(step: int, done: Callable[[Outcome], None]) -> None:
            about = coding.Message(message.names, message.dtype, self._rank, self._world, step)
            about.memory, about.floors = memory, () if floor is None else (floor,)
            runner.submit(program, message.values, about, done, ready=self._now())

        return start

    def _codec_of_messages(self, codec: Codec, route: str) -> coding.MessageCodec | None:
        """None: it goes in rounds."""
        on_device = self.own.device.type != "cpu"
        found = codes_messages(codec, route, on_device)
        if found is not None and on_device and (codec.shaped or len(places_of(route)) > 1):
            raise Unsupported(
                f"{codec} by {route} is not for the host runner on a GPU, which codes on one device and leaves noise "
                "to streams: leave it out of --codecs, or use --device cpu; bench/exchange_gpu.py times streams"
            )
        return found

    def _in_rounds(self, codec: Codec, memory: Memory, step: int, done: Callable[[Outcome], None]) -> None:
        context = Context(
            "gradient", step, rank=self._rank, world=self._world, state=memory.state("gradient", codec.name)
        )
        about = coding.Message(["gradient"], self.result.dtype, self._rank, self._world, step)
        start = functools.partial(rounds.of, codec, [self.result], [context], memory)
        submit_rounds(runner_of(self.channel), f"{codec} at step {step}", start, about, done, ready=self._now())

    def _now(self) -> torch.cuda.Event | None:
        """When all is there that was written so far."""
        on_gpu = self.own.device.type == "cuda"
        return torch.cuda.current_stream(self.own.device).record_event() if on_gpu else None

    # -- verification -------------------------------------------------------------------------------------------

    def _reference(self) -> None:
        """The mean in float64, and the mean of magnitudes, which says how much rounding can matter."""
        exact = self.own.double()
        magnitude = exact.abs()
        dist.all_reduce(exact)
        dist.all_reduce(magnitude)
        self._mean, self._magnitude = exact / self._world, magnitude / self._world

    def _verify(self, way: _Way) -> None:
        for _ in range(2):  # the second one into buffers that are there
            self.result.copy_(self.own)
            way.run()
        bits = torch.tensor([bit_sum(self.result)])
        seen = [torch.zeros_like(bits) for _ in range(self._world)]
        dist.all_gather(seen, bits)
        if any(not torch.equal(other, seen[0]) for other in seen):
            raise WrongResult(f"{way.name} by {way.route} left different bits on different ranks: this is a bug")
        allowed = self._allowed(way)
        if allowed is not None:
            off = (self.result.double() - self._mean).abs()
            way.wrong = int((off > allowed).sum())

    def _allowed(self, way: _Way) -> torch.Tensor | None:
        """How far from the mean each value may be; None where nothing is promised."""
        sums = self._magnitude * self._world * 2.0**-23 + torch.finfo(torch.float32).tiny  # float32's own rounding
        codec, steps = way.codec, 2
        if codec is None or codec.lossless:
            return sums
        if isinstance(way.floor, Floor | torch.Tensor) and isinstance(codec, GComp) and codec.mode == "near":
            if codec.error_memory is not None:
                return None
            f = way.floor.tensor() if isinstance(way.floor, Floor) else way.floor
            return sums + torch.where(f == EXACT, 0.0, torch.exp2(f.double()))
        kept = 7 if isinstance(codec, Cast) else codec.keep if isinstance(codec, GComp) else None
        if kept is None or codec.error_memory is not None:
            return None
        if way.route in ("native", "allreduce"):
            steps = self._world + 1  # every partial sum is rounded
        return sums + steps * self._magnitude * 2.0 ** -(kept + 1)

    # -- time ---------------------------------------------------------------------------------------------------

    def _time(self, way: _Way) -> float:
        self.result.copy_(self.own)
        self._synchronize()
        dist.barrier()
        start = time.perf_counter()
        way.run()
        self._synchronize()
        return time.perf_counter() - start

    def _synchronize(self) -> None:
        if self.own.device.type == "cuda":
            torch.cuda.synchronize(self.own.device)

    def _row(self, way: _Way, times: list[float], native: float) -> Result:
        size, world = self.own.numel() * self.own.itemsize, self._world
        ring = 2 * (world - 1) * size // world
        hosts = len(self.channel.topology.hosts)
        if way.last is not None:
            sent, out = way.last.bytes_sent, way.last.bytes_out
        else:  # what torch's ring sends
            sent = out = ring // (2 if way.name == NATIVE[1] else 1)
        totals = torch.zeros(hosts + 1, dtype=torch.int64)
        here = next(i for i, host in enumerate(self.channel.topology.hosts) if self._rank in host)
        per_host = out if way.last is not None else out // len(self.channel.topology.hosts[here])
        totals[here], totals[hosts] = per_host, 0
        dist.all_reduce(totals)
        most = torch.tensor([sent])
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        host_sent = int(totals[:hosts].max())
        # A ring visits one host after the other: what enters a host also leaves it once.
        ratio = ring / host_sent if host_sent else 1.0
        seconds = statistics.median(times)
        return Result(
            codec=way.name,
            route=way.route,
            bytes=size,
            ranks=world,
            hosts=hosts,
            milliseconds=1e3 * seconds,
            spread=1e3 * (max(times) - min(times)),
            algorithm_gbps=size / seconds / 1e9,
            bus_gbps=int(most) / seconds / 1e9,
            effective_gbps=ring / seconds / 1e9,
            sent=int(most),
            host_sent=host_sent,
            ratio=ratio,
            wrong=way.wrong,
            speedup=native / seconds,
            of_ideal=seconds / (native / ratio),
        )


def _on(floor: Floor | torch.Tensor, device: torch.device) -> Floor | torch.Tensor:
    if isinstance(floor, torch.Tensor):
        return floor.to(device)
    second = None if floor.second is None else floor.second.detach().to(device)
    return Floor(floor.theta.detach().to(device), second, floor.c0, floor.c1, floor.c2)


def sized(sample: Sample, count: int) -> Sample:
    """The first values of a sample; where it has too few, it is repeated."""
    times = -(-count // sample.values.numel())
    snapshot = sample.snapshot
    if snapshot is not None and times > 1:
        state = [t.repeat(times)[:count] for t in (snapshot.gradient, snapshot.theta, snapshot.first, snapshot.second)]
        snapshot = Snapshot(snapshot.step, snapshot.loss, snapshot.lr, *state)
    return Sample(sample.name, sample.values.repeat(times)[:count], snapshot)


def shared(sample: Sample | None) -> Sample:
    """Rank 0's sample on all ranks; the others pass None."""
    about: list[Any] = [None]
    if sample is not None:
        snapshot = sample.snapshot
        state = None if snapshot is None else (snapshot.step, snapshot.loss, snapshot.lr)
        about = [(sample.name, sample.values.numel(), state)]
    dist.broadcast_object_list(about)
    name, count, state = about[0]
    tensors = [torch.empty(count) for _ in range(1 if state is None else 4)]
    if sample is not None:
        own = sample.snapshot
        tensors = [sample.values] if own is None else [sample.values, own.theta, own.first, own.second]
    for tensor in tensors:
        dist.broadcast(tensor, 0)
    if state is None:
        return Sample(name, tensors[0])
    return Sample(name, tensors[0], Snapshot(*state, *tensors))


def pair_bandwidths() -> list[list[float]]:
    """Bit/s from each rank (row) to each other (column): every rank sends to one and receives from one at a time."""
    rank, world = dist.get_rank(), dist.get_world_size()
    data, into = torch.zeros(_PAIR_BYTES, dtype=torch.uint8), torch.zeros(_PAIR_BYTES, dtype=torch.uint8)
    rates = torch.zeros(world, world, dtype=torch.float64)
    for step in range(1, world):
        to, of = (rank + step) % world, (rank - step) % world
        best = float("inf")
        for _ in range(3):
            dist.barrier()
            start = time.perf_counter()
            works = [dist.irecv(into, of), dist.isend(data, to)]
            for work in works:
                assert work is not None
                work.wait()
            best = min(best, time.perf_counter() - start)
        rates[rank, to] = 8 * _PAIR_BYTES / best
    dist.all_reduce(rates)
    matrix: list[list[float]] = rates.tolist()
    return matrix


def identity_card(version: str) -> dict[str, str]:
    """What all ranks should have in common, and where this one runs."""
    engine = engines.pick("cpu")
    return {
        "gradzip": version,
        "format": str(wire.VERSION),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "engine": f"native/{engine.isa()}" if engine.NAME == "native" else str(engine.NAME),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "host": socket.gethostname(),
    }


def differences(cards: Sequence[dict[str, str]]) -> list[str]:
    """What ranks do not have in common, in words."""
    found = []
    for key in cards[0]:
        ranks: dict[str, list[int]] = {}
        for rank, card in enumerate(cards):
            ranks.setdefault(card[key], []).append(rank)
        if key != "host" and len(ranks) > 1:
            said = "; ".join(f"{value} on rank {', '.join(map(str, who))}" for value, who in ranks.items())
            found.append(f"ranks differ in {key}: {said}")
    return found
