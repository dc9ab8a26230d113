"""Runs programs on threads of the host, over Gloo. Values lie on the CPU, or on a GPU (from_device.py).

A message is cut into chunks that go through three threads one behind the other: the first encodes and starts to send,
the next waits for what comes, adds it up and sends the sum on, the last one waits for the sums and decodes them. While
one chunk is coded others are on the wire. Where a message is cut changes no bit of the result.

Frames travel in their exact size and are received into buffers of the largest size that they can have. In front of
each are its bytes and a number that all ranks know: of the program, the step and the chunk.
"""

from __future__ import annotations

import functools
import hashlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from queue import SimpleQueue
from typing import NamedTuple, Protocol

import torch

from ...errors import CodecError, PeerError
from ...routes import NAMED, Route
from ...spans import span
from ..coding import RAW, Coder, Frames, Message, MessageCodec, Values
from ..compiler import compile_route, lowered
from ..finiteness import all_finite
from ..flattening import flatten
from ..outcome import Outcome
from ..parts import Table
from ..peers.channel import Channel
from ..peers.gloo import Pending
from ..program import (
    VALUES,
    AllGather,
    AllToAll,
    Broadcast,
    Buffer,
    Coding,
    Communicate,
    Copy,
    Decode,
    Encode,
    Gather,
    Pass,
    Program,
    Recode,
    Step,
)
from ..topology import Topology
from . import streams

# A chunk costs the host of a device much, whatever its size, and coding it hardly anything: there whole buckets overlap
# with each other, and only frames that are long by themselves are cut (docs/log.md, "Exchange on GPUs").
CHUNK_ON_DEVICE, TWO_FROM = 1 << 21, 1 << 20
THREADS = 3
IN_FLIGHT = 8  # chunks that are begun and not yet through: what their buffers take is bounded
HEAD = 16  # bytes in front of a frame
_ALIGN = 8  # bytes: frames that travel together begin at multiples of it
_EXCHANGES, _CHUNKS = 1 << 8, 1 << 9  # of a program, and of all programs before tags are used again
_DIGESTS = (1 << 30) // (_EXCHANGES * _CHUNKS) - 1


class Frame(NamedTuple):
    """A frame with room in front of it for what is sent along."""

    room: torch.Tensor
    size: int
    source: int = -1  # the rank that sent it; -1: it was made here

    @property
    def data(self) -> torch.Tensor:
        return self.room[HEAD : HEAD + self.size]


class HostProgram:
    """A message's program with all that this rank needs to run it: made once for a layout of the message."""

    def __init__(
        self,
        program: Program,
        codec: MessageCodec,
        chunk: int | None = None,
        route: str | None = None,
        two_from: int | None = None,
    ) -> None:
        """`chunk`: if not the codec's; `route` is what the user calls the program's; `two_from`: see Table.chunks."""
        self.program, self.codec = program, codec
        self.words = f"{program.codec} by {route or program.route}"
        self.chunks = [Chunk(part) for part in lowered(program).chunked(chunk or codec.chunk, codec.cuttable, two_from)]


def _nothing() -> None:
    """There is nothing to wait for, and nobody to tell."""


WhenAgreed = Callable[[Callable[[], None]], None]


def at_once(tell: Callable[[], None]) -> None:
    """Ranks agree already."""
    tell()


class HostMessage:
    """Tensors that travel together by one codec and route, for as long as they stay where they are."""

    def __init__(self, codec: MessageCodec, route: str, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
        """The values of each tensor lie densely in memory, in whatever order of dimensions."""
        self.codec, self._route, self.names = codec, route, tuple(names)
        self.values = Values([flatten(tensor, tensor) for tensor in tensors], shaped=tensors)
        self.dtype = tensors[0].dtype
        self._program: HostProgram | None = None

    @cached_property
    def described(self) -> str:
        """What all ranks must agree on."""
        shapes = [(name, tuple(tensor.shape)) for name, tensor in zip(self.names, self.values.shaped)]
        layout = hashlib.blake2b(repr((shapes, self.dtype)).encode(), digest_size=4).hexdigest()
        words = f"{self.codec.text} by {self._route} for {self.names[0]!r} and {len(self.names) - 1} more"
        return f"{words}, layout {layout}"

    def program(self, topology: Topology) -> HostProgram:
        """Its program, which is compiled once."""
        if self._program is None:
            sizes, sums = [tensor.numel() for tensor in self.values.tensors], self.codec.codes_sums
            route = Route.parse(self._route)
            if self.codec.adds_frames and not route.compresses:
                route = NAMED["alltoall"]  # an all-reduce of frames, lowered: all-to-all, sums, all-gather
            program = compile_route(self.codec.text, route, self.names, sizes, self.dtype, topology, sums)
            on_device = streams.are_needed(self.values.tensors[0].device)
            cut = (CHUNK_ON_DEVICE, self._route, TWO_FROM) if on_device else (None, self._route, None)
            self._program = HostProgram(program, self.codec, *cut)
        return self._program


class Chunk:
    """A program of which each stage ends with an exchange, but for the last one."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.stages: list[list[Step]] = [[]]
        for step in program.steps:
            self.stages[-1].append(step)
            if isinstance(step, Communicate):
                self.stages.append([])
        self.digest = int(program.digest, 16)


@dataclass(eq=False)
class Sent:
    """What was submitted and is on its way."""

    message: Message
    agreed: Callable[[], None]  # returns when all ranks have said that they do the same; raises if they do not
    done: Callable[[Outcome], None] = field(init=False)
    when_agreed: WhenAgreed = field(default=at_once, kw_only=True)  # calls then
    outcome: Outcome = field(default_factory=Outcome, kw_only=True)
    left: int = field(default=1, kw_only=True)  # chunks
    lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def report(self) -> None:
        """Takes note of what came of it, when the last chunk is through."""

    def end(self, error: BaseException | None = None) -> None:
        """A chunk is through, or has failed; tells whoever waits for the message, once."""
        with self.lock:
            self.left = self.left - 1 if error is None or self.left <= 0 else 0
            last = self.left == 0
            self.left -= last
        if last:
            try:
                if error is None:
                    self.report()
            except Exception as reason:
                error = reason
            self.outcome.error = error
            self.done(self.outcome)


@dataclass(eq=False)
class SentMessage(Sent):
    prepared: HostProgram
    values: Values
    begin: Callable[[], None] = _nothing  # called before the first encode, where it may wait
    enqueued: Callable[[], None] = _nothing  # called when the means are on the current stream, maybe still to be done
    coder: Coder | None = None
    finite: Callable[[], bool] | None = None  # whether the means are, where that has been asked before `enqueued`

    def report(self) -> None:
        outcome = self.outcome
        outcome.collectives = 1
        assert self.coder is not None
        self.coder.finish()
        added = self.coder.added_noise(self.values)
        if added is None:
            outcome.finite = self._all_finite() if self.finite is None else self.finite()
        else:
            outcome.finite = math.isfinite(added.squares)
            outcome.noise, outcome.squares, outcome.coarser = added.noise, added.squares, added.coarser
            outcome.allowed, outcome.values = added.share * added.squares, sum(self.prepared.program.sizes)

    def _all_finite(self) -> bool:
        joined = self.values.joined
        return all_finite(self.values.tensors if joined is None else [joined])


class HostRunner:
    """Runs messages in the order in which they are submitted, which is the same on all ranks."""

    def __init__(self, channel: Channel) -> None:
        self.agreed: set[str] = set()  # descriptions of messages that ranks have told each other of
        self.channel = channel
        self._queues: list[SimpleQueue[Running | None]] = [SimpleQueue() for _ in range(THREADS)]
        self._threads: list[threading.Thread] = []
        self._changed = threading.Condition()
        self._under_way: dict[Sent, None] = {}
        self._count = 0
        self._free = threading.Semaphore(IN_FLIGHT)

    def submit(
        self,
        prepared: HostProgram,
        values: Values,
        message: Message,
        done: Callable[[Outcome], None],
        begin: Callable[[], None] = lambda: None,
        agreed: Callable[[], None] = lambda: None,
        ready: streams.Mark = None,
        enqueued: Callable[[], None] = lambda: None,
        when_agreed: WhenAgreed = at_once,
    ) -> None:
        """Replaces values by their mean over all ranks; `done` is called once, on one of the runner's threads.

        `begin` may complete the message, and wait for what is needed to do so; `agreed` waits until it is known that
        all ranks send the same, and `when_agreed` calls then. Values on a device are there when `ready` is.
        """
        kind: type[ChunkRun] = ChunkRun
        device = values.tensors[0].device
        if streams.are_needed(device):
            from .from_device import DeviceRun, Offloaded

            if codes_on_host(prepared.program):
                offloaded = Offloaded(values, message, ready, begin, done, enqueued)
                values, begin, done = offloaded.values, offloaded.fetch, offloaded.put_back
            else:
                kind = DeviceRun
        chunks = len(prepared.chunks)
        sent = SentMessage(message, agreed, prepared, values, begin, enqueued, left=chunks, when_agreed=when_agreed)
        runs = [functools.partial(kind, self.channel, sent, chunk, ready=ready) for chunk in prepared.chunks]
        self.take(sent, done, runs)

    def take(self, sent: Sent, done: Callable[[Outcome], None], chunks: Sequence[Callable[[int], Running]]) -> None:
        """Starts chunks, each of which is made with its number."""

        def ended(outcome: Outcome) -> None:
            try:
                done(outcome)
            finally:  # who drains wants to see what came of it
                with self._changed:
                    self._under_way.pop(sent, None)
                    self._changed.notify_all()

        sent.done = ended
        with self._changed:
            self._under_way[sent] = None
            if chunks and not self._threads:
                self._start()
            for chunk in chunks:
                self._queues[0].put(chunk(self._count))
                self._count += 1

    def expect(self, done: Callable[[Outcome], None]) -> Callable[[Outcome], None]:
        """What is to be called when something is through that is done elsewhere, but fails with the rest.

        It hands on to `done`, which is called once.
        """
        sent = Sent(Message((), torch.float32), _nothing)
        self.take(sent, done, ())
        if self.channel.error is not None:
            sent.end(self.channel.error)

        def ended(outcome: Outcome) -> None:
            sent.outcome = outcome
            sent.end(outcome.error)

        return ended

    def drain(self) -> None:
        """Returns when all messages submitted so far are through."""
        with self._changed:
            waiting = list(self._under_way)
            self._changed.wait_for(lambda: not any(sent in self._under_way for sent in waiting))

    def fail(self, error: BaseException) -> None:
        """Ends all messages with an error, also those that a thread is stuck in."""
        with self._changed:
            waiting = list(self._under_way)
        for sent in waiting:
            sent.end(error)

    def stop(self, patience: float) -> bool:
        """Ends the threads after what was submitted; False if one is still busy after that many seconds."""
        self._queues[0].put(None)  # each thread tells the next, behind all that it hands on
        deadline = time.monotonic() + patience
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _start(self) -> None:
        for number in range(THREADS):
            name = f"gradzip-exchange-{number}"
            self._threads.append(threading.Thread(target=self._work, args=(number,), name=name, daemon=True))
            self._threads[-1].start()

    def _work(self, number: int) -> None:
        with torch.no_grad():
            while (run := self._queues[number].get()) is not None:
                if number == 0:
                    self._free.acquire()  # ranks take chunks in the same order: one of those in flight will end
                try:
                    with run.stream():
                        over = run.go_on()
                        while not over and number == THREADS - 1:
                            over = run.go_on()
                        if over:
                            run.close()
                            run.sent.end()
                except BaseException as error:  # buffers are not handed back: data may still arrive there
                    run.sent.end(self.channel.error or self.channel.explained(error))
                    over = True
                if over:
                    self._free.release()
                else:
                    self._queues[number + 1].put(run)
                del run  # it holds memory of the device, and the next one may come late
        if number + 1 < THREADS:
            self._queues[number + 1].put(None)


def codes_on_host(program: Program) -> bool:
    """Whether its route wants all coding on the CPU; one that names no device is coded where the values are."""
    return {step.device for step in program.steps if isinstance(step, Coding)} == {"cpu"}


def runner_of(channel: Channel) -> HostRunner:
    """The runner of a channel, which ends with it."""
    for worker in channel.workers:
        if isinstance(worker, HostRunner):
            return worker
    runner = HostRunner(channel)
    channel.workers.append(runner)
    return runner


class Running(Protocol):
    """What the runner's threads take one behind the other."""

    @property
    def sent(self) -> Sent: ...
    def stream(self) -> streams.Stream:
        """What the thread that goes on with it works on."""
        ...

    def go_on(self) -> bool:
        """Up to the next exchange, which is started; True if there is none."""
        ...

    def close(self) -> None:
        """Hands buffers back."""
        ...


class ChunkRun:
    """One chunk in one step, on this rank."""

    def __init__(
        self,
        channel: Channel,
        sent: SentMessage,
        chunk: Chunk,
        number: int,
        ready: streams.Mark = None,
        first_stage: int = 0,
        what: str = "",
    ) -> None:
        """`first_stage` and `what`: it is part of something that has been through so many stages."""
        self._first_stage, self.stages = first_stage, len(chunk.stages)
        self.sent, self._channel, self._chunk = sent, channel, chunk
        self._program, self._rank = chunk.program, channel.rank
        self._number, self._stage = number, 0
        self._check = (chunk.digest + sent.message.step * 0x9E3779B97F4A7C15) % (1 << 63)
        self._plain: dict[str, Values] = {VALUES: sent.values}
        self._coded: dict[str, list[list[Frame]]] = {}  # by term and owner
        self._taken: list[torch.Tensor] = []
        self._raw = RAW.coder(sent.message)
        self._pending: Pending | None = None
        self._expected: dict[int, tuple[torch.Tensor, list[int]]] = {}  # what comes from each rank: where, and bounds
        self._land: Callable[[], None] = lambda: None
        names = self._program.names
        which = f"at step {sent.message.step} for {names[0]!r} and {len(names) - 1} more"
        self._what = what or f"{sent.prepared.words} {which}"

    def go_on(self) -> bool:
        """Up to the next exchange, which is started; True if there is none."""
        if self._channel.error is not None:
            raise self._channel.error
        began = time.perf_counter()
        if self._pending is not None:
            with span("wire", self._what):
                self._wait(self._pending)
            self.sent.agreed()
            self._land()
            self._pending = None
        arrived = time.perf_counter()
        self._saw("code")
        if self.sent.coder is None:
            self.sent.begin()
            self.sent.coder = self.sent.prepared.codec.coder(self.sent.message)
            self.sent.coder.measure(self.sent.values)
        with span("code", self._what):
            started = self._run_stage()
        self._saw("coded")
        if started:  # a rank that comes late is no slow network: what is sent before all agree is under way from then
            self.sent.when_agreed(functools.partial(self._saw, "start", self._stage))
        self._stage += 1
        over = self._stage == len(self._chunk.stages)
        if over:
            self.sent.agreed()
            self._end()
        with self.sent.lock:
            self.sent.outcome.waiting += arrived - began
            self.sent.outcome.coding += time.perf_counter() - arrived
        return over

    def stream(self) -> streams.Stream:
        """What the thread that goes on with it works on."""
        return streams.HOST

    def _wait(self, pending: Pending) -> None:
        pending.wait()

    def _end(self) -> None:
        """All is decoded."""

    def _run_stage(self) -> bool:
        """Whether data is under way then."""
        for step in self._chunk.stages[self._stage]:
            if self._program.takes_part(self._rank, step):
                self._do(step)
        return self._pending is not None

    def _saw(self, kind: str, stage: int | None = None) -> None:
        at = self._first_stage + (self._stage if stage is None else stage)
        self._channel.watch.saw(kind, at, self._number, self._what)

    def close(self) -> None:
        """Hands buffers back."""
        self._coded.clear()
        self._channel.buffers.give(self._taken)

    # -- coding -------------------------------------------------------------------------------------------------

    def _do(self, step: Step) -> None:
        if isinstance(step, Communicate):
            self._communicate(step)
            return
        with span(step.name.lower()):
            if isinstance(step, Encode):
                self._encode(step, self._plain[step.source])
            elif isinstance(step, Decode):
                self._plain[step.target] = self._decode(step, self._buffer(step.target))
            elif isinstance(step, Recode):
                self._recode(step)
            else:
                assert isinstance(step, Copy)
                self._plain[step.target] = self._plain[step.source]

    def _encode(self, step: Encode | Recode, values: Values) -> None:
        target = self._buffer(step.target)
        table = self._program.table(self._rank, target)
        if target.leaf:
            owners = [self._program.leaf(self._rank, target, step)]
        else:
            stays = self._program.stays(self._rank, target)
            owners = [owner for owner in range(table.owners) if owner != stays]
        frames = [self._room(self._bound(target, table, owner)) for owner in owners]
        rooms = [room[HEAD:] for room in frames]
        sizes = self._coder(target).encode(table, owners, values, self._program.hop(target.name), rooms)
        made = dict(zip(owners, map(Frame, frames, sizes)))
        if target.leaf:
            self._coded[target.name] = [list(made.values())]
        else:
            nothing = Frame(torch.empty(0, dtype=torch.uint8), 0)
            self._coded[target.name] = [[made.get(owner, nothing) for owner in range(table.owners)]]

    def _decode(self, step: Decode | Recode, target: Buffer) -> Values:
        source = self._buffer(step.source)
        table = self._program.table(self._rank, source)
        in_place = target.name == VALUES and step.own != VALUES  # what is read must not be written meanwhile
        out = self._plain[VALUES] if in_place else self._nothing(target)
        owners = self._owners(step)
        coder, hop = self._coder(source), self._program.hop(source.name)
        own = None if step.own is None else self._plain[step.own]
        by = self._program.world if step.divide else 1
        terms = [self._terms(step, number) for number in range(len(owners))]
        try:
            coder.decode_all(table, owners, terms, own, hop, out, by)
        except CodecError as error:
            raise self._blamed(step, table, owners, error) from error
        if target.name != VALUES or in_place:
            return out
        values = self._plain[VALUES]
        for owner in owners:
            if table.of_owner(owner):
                torch._foreach_copy_(values.parts(table, owner), out.parts(table, owner))
        return values

    def _recode(self, step: Recode) -> None:
        source, target = self._buffer(step.source), self._buffer(step.target)
        table = self._program.table(self._rank, source)
        owner = self._program.leaf(self._rank, source, step) if source.leaf else 0
        if source.over != target.over or not (source.leaf or table.owners == 1):
            self._encode(step, self._decode(step, Buffer("", False, source.within, wide=target.wide)))
            return
        room = self._room(self._bound(target, table, owner))
        own = None if step.own is None else self._plain[step.own]
        by = self._program.world if step.divide else 1
        hop, after = self._program.hop(source.name), self._program.hop(target.name)
        try:
            size = self._coder(target).recode(table, owner, self._terms(step, 0), own, hop, by, after, room[HEAD:])
        except CodecError as error:
            raise self._blamed(step, table, [owner], error) from error
        self._coded[target.name] = [[Frame(room, size)]]

    def _terms(self, step: Decode | Recode, number: int) -> Frames:
        """The frames to be added for an owner; None stands for this rank's own values."""
        source = self._buffer(step.source)
        own = self._program.place_among_terms(self._rank, source) if step.own is not None else -1
        terms: list[torch.Tensor | None] = []
        for place, frames in enumerate(self._coded[step.source]):
            terms.append(None if place == own and not source.leaf else frames[number].data)
        return [*terms, None] if step.own is not None and source.leaf else terms

    def _owners(self, step: Decode | Recode) -> list[int]:
        """Whose parts are decoded."""
        source = self._buffer(step.source)
        table = self._program.table(self._rank, source)
        return [self._program.leaf(self._rank, source, step)] if source.leaf else list(range(table.owners))

    def _blamed(self, step: Decode | Recode, table: Table, owners: Sequence[int], error: CodecError) -> PeerError:
        """What to raise for a frame that cannot be decoded: each is tried by itself, to find out who sent it."""
        coder, hop = self._coder(self._buffer(step.source)), self._program.hop(step.source)
        of_owners = zip(owners, zip(*self._coded[step.source]))
        for owner, frame in ((owner, frame) for owner, frames in of_owners for frame in frames):
            if frame.source < 0:
                continue
            try:
                coder.decode(table, owner, [frame.data], None, hop, self._nothing(self._buffer(step.source)), 1)
                coder.check()
            except CodecError as reason:
                why = f"{type(reason).__name__}: {reason}"
                return PeerError(f"rank {frame.source} sent a frame of {self._what} damaged: {why}")
        return PeerError(f"rank {self._rank} cannot decode {self._what}: {type(error).__name__}: {error}")

    # -- communication ------------------------------------------------------------------------------------------

    def _communicate(self, step: Communicate) -> None:
        """Starts an exchange; `_land` will put what came where it belongs."""
        held = self._coded.get(step.source, [])
        members = self._program.members(self._rank)[step.group]
        me, size, source = members.rank, members.size, self._buffer(step.source)
        out: dict[int, list[list[Frame]]] = {}  # by member: terms and owners
        into: dict[int, list[int]] = {}  # by member: the largest sizes of the frames that come, term by term
        others = [(me + turn) % size for turn in range(1, size)]  # every member begins with another one
        if isinstance(step, AllToAll):
            width = len(held[0]) // size
            out = {peer: [term[peer * width : (peer + 1) * width] for term in held] for peer in others}
            bounds = self._bounds(self._rank, source)[me * width : (me + 1) * width] * len(held)
            into = dict.fromkeys(others, bounds)
        elif isinstance(step, Broadcast):
            out = dict.fromkeys(others, held) if me == 0 else {}
            into = {0: self._bounds(self._rank, source) * self._program.terms(source)} if me > 0 else {}
        elif isinstance(step, Gather):
            out = {0: held} if me > 0 else {}
            into = dict.fromkeys(others, self._bounds(self._rank, source) * len(held)) if me == 0 else {}
        elif isinstance(step, Pass):
            out, into = {(me + 1) % size: held}, {(me - 1) % size: [max(self._bounds(self._rank, source))]}
            out, into = (out, into) if size > 1 else ({}, {})
        else:
            assert isinstance(step, AllGather)
            out = dict.fromkeys(others, held)
            into = {peer: self._bounds(members.ranks[peer], source) * len(held) for peer in others}
        buffers = {peer: self._take(sum(HEAD + _aligned(bound) for bound in bounds)) for peer, bounds in into.items()}
        receives = [(members.ranks[peer], buffers[peer]) for peer in reversed(others) if peer in into]
        sends = [(members.ranks[peer], self._packed(out[peer])) for peer in others if peer in out]
        self._expected = {members.ranks[peer]: (buffers[peer], into[peer]) for peer in into}
        self._count(sends)
        self._pending = self._channel.gloo.send(sends, receives, self._tag())

        def land() -> None:
            came = {peer: self._unpacked(buffers[peer], into[peer], members.ranks[peer]) for peer in into}
            self._coded[step.target] = self._arranged(step, came, held, me, size)

        self._land = land

    def _arranged(
        self, step: Communicate, came: dict[int, list[Frame]], held: list[list[Frame]], me: int, size: int
    ) -> list[list[Frame]]:
        """Terms and owners after an exchange."""
        if isinstance(step, Broadcast):
            return _in_terms(came[0], self._program.terms(self._buffer(step.source))) if me > 0 else held
        if isinstance(step, Pass):
            return [came[(me - 1) % size]] if size > 1 else held
        if isinstance(step, Gather) and me > 0:
            return []
        if isinstance(step, AllToAll):
            width = len(held[0]) // size
            own = [term[me * width : (me + 1) * width] for term in held]
        else:
            own = held
        each = [own if peer == me else _in_terms(came[peer], len(held)) for peer in range(size)]
        if isinstance(step, AllGather) and step.joins:
            return [[frame for member in each for frame in member[term]] for term in range(len(held))]
        return [term for member in each for term in member]

    def _bounds(self, rank: int, buffer: Buffer) -> list[int]:
        table = self._program.table(rank, buffer)
        return [self._bound(buffer, table, owner) for owner in range(table.owners)]

    def _packed(self, terms: Sequence[Sequence[Frame]]) -> torch.Tensor:
        """Frames one behind the other, each with what is sent along; the only one is not copied."""
        frames = [frame for term in terms for frame in term]
        for frame in frames:
            frame.room.numpy()[:HEAD].view("<i8")[:] = frame.size, self._check
        if len(frames) == 1:
            return frames[0].room[: HEAD + frames[0].size]
        return torch.cat([frame.room[: HEAD + _aligned(frame.size)] for frame in frames])

    def _unpacked(self, buffer: torch.Tensor, bounds: Sequence[int], source: int) -> list[Frame]:
        at, frames = 0, list[Frame]()
        data = buffer.numpy()
        for bound in bounds:
            size, check = data[at : at + HEAD].view("<i8").tolist()
            if check != self._check or not 0 <= size <= bound:
                self.sent.agreed()  # says what the other rank does instead, if that is already known
                raise PeerError(
                    f"rank {source} sent something else than rank {self._rank} expects, which is {self._what}: "
                    "use the same model, policy and gradzip on all ranks"
                )
            frames.append(Frame(buffer[at:], size, source))
            at += HEAD + _aligned(size)
        return frames

    def _count(self, sends: Sequence[tuple[int, torch.Tensor]]) -> None:
        groups, outcome = self._channel.groups, self.sent.outcome
        neighbours = groups["intra"].ranks if "intra" in groups else ()
        with self.sent.lock:
            outcome.bytes_sent += sum(data.numel() for _, data in sends)
            outcome.bytes_out += sum(data.numel() for rank, data in sends if rank not in neighbours)

    def _tag(self) -> int:
        what, chunk = self._chunk.digest % _DIGESTS, self._number % _CHUNKS
        return (what * _CHUNKS + chunk) * _EXCHANGES + (self._first_stage + self._stage) % _EXCHANGES

    # -- buffers ------------------------------------------------------------------------------------------------

    def _buffer(self, name: str) -> Buffer:
        return self._program.buffer(name)

    def _coder(self, frames: Buffer) -> Coder:
        assert self.sent.coder is not None
        return self._raw if frames.raw else self.sent.coder

    def _bound(self, buffer: Buffer, table: Table, owner: int) -> int:
        codec = RAW if buffer.raw else self.sent.prepared.codec
        return codec.bound(table, owner, self._kind(buffer))

    def _kind(self, buffer: Buffer) -> torch.dtype:
        return torch.promote_types(self._program.dtype, torch.float32) if buffer.wide else self._program.dtype

    def _room(self, size: int) -> torch.Tensor:
        return self._take(HEAD + _aligned(size))

    def _take(self, size: int) -> torch.Tensor:
        buffer = self._channel.buffers.take(size)
        self._taken.append(buffer)
        return buffer[:size]

    def _nothing(self, buffer: Buffer) -> Values:
        kind, device = self._kind(buffer), streams.current().device
        return Values([torch.empty(size, dtype=kind, device=device) for size in self._program.sizes])


def _in_terms(frames: Sequence[Frame], terms: int) -> list[list[Frame]]:
    each = len(frames) // max(terms, 1)
    return [list(frames[i * each : (i + 1) * each]) for i in range(terms)]


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
