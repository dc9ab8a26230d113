"""The library's exchange for W ranks in one process: HostBackward, HostRunner, Memory and codecs are the real ones.

Only the wire is replaced. Each rank runs in a thread of its own through the code of the host runner that it runs on a
cluster, and where it would send bytes it leaves them for the others and waits until all have come. Everything is a
function of the gradients: threads change nothing but the time it takes.

What torch would add up itself (plain averaging) is added in the order of ranks here; Gloo and NCCL have an order of
their own.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch

from gradzip.exchange.on_host.backward import Attached, HostBackward
from gradzip.exchange.outcome import Outcome
from gradzip.exchange.peers.buffers import Buffers
from gradzip.exchange.peers.channel import Channel
from gradzip.exchange.shared_book import SharedBook
from gradzip.exchange.topology import Topology
from gradzip.exchange.way import Scheme
from gradzip.feedback import Memory
from gradzip.hooks.ways import Ways
from gradzip.policy import Adaptive, Policy

Gradients = Mapping[str, torch.Tensor]
PATIENCE = 300.0  # seconds that a rank waits for the others
# All ranks' frames go to all. Messages that are dealt out in two groups the runner does not cut, so that it codes whole
# tensors; each host has one rank here, so that it is the route "allgather".
BY_TENSOR = "enc.cpu > ag.intra > ag.inter > dec.cpu"


class _Meeting:
    """Where ranks add up what is sent as it is."""

    def __init__(self, world: int) -> None:
        self.slots: list[torch.Tensor | None] = [None] * world
        self._barrier = threading.Barrier(world, timeout=PATIENCE)

    def sum(self, rank: int, tensor: torch.Tensor) -> torch.Tensor:
        """In the order of ranks."""
        self.slots[rank] = tensor
        self._barrier.wait()
        first, *others = cast(list[torch.Tensor], self.slots)
        total = first.clone()
        for other in others:
            total += other
        self._barrier.wait()  # nobody goes on, and writes to its tensor, before all have read it
        return total

    def abort(self) -> None:
        self._barrier.abort()


class _Wire:
    """What host runners have sent and nobody has received yet, by tag, sender and receiver."""

    def __init__(self) -> None:
        self._changed, self._broken = threading.Condition(), False
        self._sent: defaultdict[tuple[int, int, int], deque[torch.Tensor]] = defaultdict(deque)

    def put(self, key: tuple[int, int, int], data: torch.Tensor) -> None:
        with self._changed:
            self._sent[key].append(data.clone())
            self._changed.notify_all()

    def take(self, key: tuple[int, int, int]) -> torch.Tensor:
        with self._changed:
            came = self._changed.wait_for(lambda: self._broken or self._sent[key], PATIENCE)
            if self._broken or not came:
                raise threading.BrokenBarrierError
            return self._sent[key].popleft()

    def abort(self) -> None:
        with self._changed:
            self._broken = True
            self._changed.notify_all()


@dataclass
class _Gloo:
    """One rank's end of the wire, as exchange/peers/gloo.py has it."""

    rank: int
    wire: _Wire

    def send(
        self, parts: Sequence[tuple[int, torch.Tensor]], into: Sequence[tuple[int, torch.Tensor]], tag: int
    ) -> _Pending:
        for to, data in parts:
            self.wire.put((tag, self.rank, to), data)
        return _Pending(self, into, tag)

    def send_row(self, row: torch.Tensor, to: Sequence[int], of: Sequence[int], tag: int) -> _Pending:
        into = {rank: torch.empty_like(row) for rank in of}
        pending = self.send([(rank, row) for rank in to], list(into.items()), -1 - tag)  # data has tags from 0 on
        pending.received = into
        return pending


@dataclass
class _Pending:
    gloo: _Gloo
    into: Sequence[tuple[int, torch.Tensor]]
    tag: int
    received: dict[int, torch.Tensor] = field(default_factory=dict)

    def wait(self, arrived: Callable[[int, torch.Tensor], None] = lambda rank, data: None) -> None:
        for source, buffer in self.into:
            data = self.gloo.wire.take((self.tag, source, self.gloo.rank))
            buffer[: data.numel()] = data
            arrived(source, buffer)


class _Watch:
    def saw(self, *what: object) -> None:
        """Nobody asks for a profile here."""


class _Channel:
    """What HostBackward and the host runner use of a channel."""

    error = None

    def __init__(self, rank: int, world: int, device: torch.device, meeting: _Meeting, wire: _Wire) -> None:
        self.rank, self.world, self.device = rank, world, device
        self.topology = Topology(rank, tuple((r,) for r in range(world)))
        self.groups = self.topology.groups()
        self.buffers, self.meeting = Buffers(pinned=device.type == "cuda"), meeting
        self.gloo, self.watch = _Gloo(rank, wire), _Watch()
        self.workers: list[Any] = []  # host runners

    def explained(self, error: BaseException) -> BaseException:
        return error


class _Backward(HostBackward):
    """A pass, but for what torch would add up."""

    channel: _Channel  # type: ignore[assignment]

    def _average(self, buffer: torch.Tensor, done: Callable[[Outcome], None]) -> None:
        buffer.mul_(1 / self.channel.world)
        buffer.copy_(self.channel.meeting.sum(self.channel.rank, buffer))
        done(Outcome(bytes_sent=2 * (self.channel.world - 1) * buffer.nbytes // self.channel.world, collectives=1))


class ExactWorkers:
    """Error memory and codec state of all ranks; `mean` is one step of what `gradzip.attach` does."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        policy: Policy,
        world: int,
        by_tensor: bool = False,
    ) -> None:
        """`by_tensor`: tensors are coded whole where they go by `allgather`, as tables are made.

        A cluster codes each owner's part of a tensor by itself, so that top k and signs choose among its values.
        """
        self._by_tensor = by_tensor
        names: dict[torch.Tensor, str] = {p: n for n, p in model.named_parameters()}
        self.world, self.step, self.bytes_sent = world, 0, 0  # bytes that rank 0 has sent
        self._parameters, self._optimizer, self._policy = names, optimizer, policy
        self._device = next(iter(names)).device
        self._meeting, self._wire = _Meeting(world), _Wire()
        self._channels = [_Channel(rank, world, self._device, self._meeting, self._wire) for rank in range(world)]
        self._memories = [Memory(rank) for rank in range(world)]
        self._books = [SharedBook() for _ in range(world)]
        self._ways = Ways(names, self._device, [optimizer] if optimizer else [], self._channels[0].topology)

    def mean(self, gradients: list[Gradients]) -> dict[str, torch.Tensor]:
        """What all ranks get for the gradients of each, by parameter name. Ends the step."""
        ways, adaptive = self._ways.of(self._policy, 1.0), isinstance(self._policy, Adaptive)
        if self._by_tensor:
            all_gather = [name for name, way in ways.items() if way.route == "allgather"]
            ways = {**ways, **{name: replace(ways[name], route=BY_TENSOR) for name in all_gather}}
        results: list[dict[str, torch.Tensor]] = [{} for _ in range(self.world)]
        failures: list[BaseException] = []

        def run(rank: int) -> None:
            try:
                with torch.no_grad():
                    results[rank] = self._run(rank, ways, gradients[rank], adaptive)
            except BaseException as failure:
                failures.append(failure)
                self._meeting.abort()
                self._wire.abort()

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(self.world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise next((f for f in failures if not isinstance(f, threading.BrokenBarrierError)), failures[0])
        for other in results[1:]:
            for name, mean in results[0].items():
                assert torch.equal(mean, other[name]), f"replicas differ in {name}"
        self.step += 1
        if isinstance(self._policy, Adaptive):
            for name, mean in results[0].items():
                self._policy.observe(name, mean)
            self._policy.end_step([float(group["lr"]) for group in getattr(self._optimizer, "param_groups", [])])
        return results[0]

    def end_epoch(self) -> None:
        if isinstance(self._policy, Adaptive):
            self._policy.end_epoch()

    def close(self) -> None:
        """Ends the host runners' threads."""
        for channel in self._channels:
            for worker in channel.workers:
                worker.stop(PATIENCE)

    def _run(self, rank: int, ways: dict[str, Any], own: Gradients, learns: bool) -> dict[str, torch.Tensor]:
        ended, over = list[Outcome](), threading.Event()

        def note(done: HostBackward) -> None:
            ended.append(done.totals)
            over.set()

        attached = Attached(
            cast(Channel, self._channels[rank]), self._memories[rank],
            note, _raise, learns=learns, books=self._books[rank],
        )  # fmt: skip
        backward = _Backward(self.step, 1.0, Scheme(ways), attached)
        buffer = torch.cat([own[name].reshape(-1) for name in ways])
        named, at = [], 0
        for name in ways:
            size = own[name].numel()
            named.append((name, buffer[at : at + size].view(own[name].shape)))
            at += size
        backward.take(buffer, named, last=True)
        if not over.wait(PATIENCE):
            raise TimeoutError(f"rank {rank} waited {PATIENCE:.0f} s for the others")
        if ended[0].error is not None:
            raise ended[0].error
        if rank == 0:
            self.bytes_sent += ended[0].bytes_sent
        return dict(named)


def _raise(text: str) -> None:
    raise AssertionError(text)
