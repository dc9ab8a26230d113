"""One backward pass, from its first bucket to its last: gradients become messages, and DDP gets its buckets back.

Gradients of equal codec and route in a bucket form a message. Factors and small uncompressed tensors wait for the last
bucket and travel together, in the order of parameter names: a few collectives for the whole step, and the same result
however DDP cuts its buckets. What a step changes in Memory counts only if its gradients proved finite on all ranks.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
import torch.distributed as dist

from . import checks
from .codecs import Codec, Context
from .codecs.baseline import Identity
from .codecs.gcomp import GComp
from .collectives import Channel, Elsewhere, Message, Outcome, average_plainly, submit
from .collectives.coder import all_finite
from .collectives.message import FACTORS
from .engines.layout import Floor
from .feedback import Memory
from .refresh import SharedBook
from .spans import until

Future = torch.futures.Future[torch.Tensor]
PLAIN = "identity/allreduce"
ALONE = "GRADZIP_ALONE"  # set to 1: a rank without any other codes its gradients as well, to see what becomes of them


@dataclass(frozen=True)
class Way:
    """What one parameter's gradient goes through in a step."""

    codec: Codec
    route: str
    late: bool  # waits for the last bucket
    floor: Floor | torch.Tensor | None
    kind: str = field(init=False, compare=False)  # codec and route, in words
    form: str | None = field(init=False, compare=False)  # how residuals are kept, as in Codec.error_memory

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", f"{self.codec}/{self.route}")
        object.__setattr__(self, "form", self.codec.error_memory)


@dataclass(eq=False)
class _Ticket:
    """A bucket that DDP waits for."""

    buffer: torch.Tensor
    done: torch.futures.Future[torch.Tensor]
    left: int = 1  # messages that it waits for, and one for those still to be started
    held: bool = False  # it waits for the end of the step
    given: bool = False
    error: BaseException | None = None


@dataclass(eq=False)
class Backward:
    """`take` is called on the thread of backward, the rest happens on the channel's threads."""

    number: int
    scale: float
    ways: dict[str, Way]  # by parameter name
    plain: bool  # nothing is compressed: as DDP does it by itself
    words: str  # the policy, for the agreement between ranks
    channel: Channel
    memory: Memory
    on_end: Callable[[Backward], None]
    check: bool = False  # compare the results of all ranks at the end
    books: SharedBook = field(default_factory=SharedBook)
    rates: list[float] = field(default_factory=list)  # the optimizer's, when the pass began
    learns: bool = False  # the policy wants to see the means
    group: dist.ProcessGroup | None = None  # where buckets of a plain step go, once ranks have agreed on such steps
    totals: Outcome = field(default_factory=Outcome)
    raw_bytes: int = 0  # of the buckets
    parts: dict[str, Outcome] = field(default_factory=dict)  # of the totals, by codec and route
    exposed: float = 0.0  # seconds from the last bucket's arrival to the end

    def __post_init__(self) -> None:
        self._lock = threading.RLock()
        self._late: list[tuple[str, torch.Tensor]] = []
        self.results: list[tuple[str, torch.Tensor]] = []  # where the means will be
        self._tickets: list[_Ticket] = []
        self._open = 1  # messages under way, and one for the buckets still to come
        self._complete = threading.Event()  # all messages are through
        self._comparison: checks.Comparison | None = None
        self._last_came: float | None = None
        self.alone = is_alone(self.channel)
        self.check &= not self.alone
        self._idle = self.alone and not self.learns and not self.memory.residuals and not self._transforms()
        self._elsewhere: Elsewhere | None = None
        if self.plain and self.group is not None and not (self.alone or self.learns or self.check):
            what = f"plain averaging at step {self.number} by torch ({self.words})"
            self._elsewhere = Elsewhere(what, self.group, self.channel, self.fail)
        shares = [way.codec.limit for way in self.ways.values() if shares_book(way.codec)]
        self._limit = min(shares) if shares else 0  # of codes in the shared book; 0: nobody uses one
        self._book = self.books.at(self.number) if shares else None
        wanted = bool(shares) and self.books.wants(self.number) and not self.alone
        self._counts = torch.zeros(256, dtype=torch.int64) if wanted else None

    def _transforms(self) -> bool:
        return any(way.codec.transforms for way in self.ways.values())

    def take_whole(self, buffer: torch.Tensor, last: bool) -> Future | None:
        """Takes a bucket of which no single gradient has to be known; None: `take` it."""
        if not self._idle and self._elsewhere is None:
            return None
        self.raw_bytes += buffer.numel() * buffer.itemsize
        future = self._kept(buffer) if self._elsewhere is None else self._averaged(buffer, self._elsewhere)
        if last:
            self._last_came = time.perf_counter()
            self._ended(None, None, Outcome())
        return future

    def _kept(self, buffer: torch.Tensor) -> Future:
        kept = _future(buffer.device)
        kept.set_result(buffer)
        return kept

    def _averaged(self, buffer: torch.Tensor, elsewhere: Elsewhere) -> Future:
        if buffer.device.type == "cuda":
            with self._lock:
                self._open += 1
            return elsewhere.average(buffer, functools.partial(self._ended, None, PLAIN))
        # torch's sum waits for ever for a rank that does something else: the ticket ends that, too
        ticket, future = self._ticket(buffer, f"at step {self.number} of {buffer.numel()} values")
        self._start(ticket, PLAIN, functools.partial(elsewhere.average, buffer))
        self._all_started(ticket)
        if self.totals.error is not None:
            self.fail(self.totals.error)
        return future

    def _ticket(self, buffer: torch.Tensor, of: str) -> tuple[_Ticket, Future]:
        ticket = _Ticket(buffer, _future(buffer.device))
        until(ticket.done, "exchange", of)
        self._tickets.append(ticket)
        return ticket, ticket.done.then(functools.partial(_buffer_or_raise, ticket))

    def take(self, buffer: torch.Tensor, named: list[tuple[str, torch.Tensor]], last: bool) -> Future:
        """Takes a bucket in hand and returns at once; the future is its averaged buffer."""
        of = f"at step {self.number} of {named[0][0]!r} and {len(named) - 1} more"
        ticket, future = self._ticket(buffer, of)
        self.results += named
        if self.alone:
            named = self._keep_own(named)
        plain = self.plain and not self.alone
        late = [] if plain else [(name, g) for name, g in named if self.ways[name].late]
        ticket.held = bool(late) or self.check
        self._late += late
        self.raw_bytes += buffer.numel() * buffer.itemsize
        ready = None
        if buffer.device.type == "cuda" and (last or len(late) < len(named)):
            ready = torch.cuda.current_stream(buffer.device).record_event()
        if plain:
            words = self._plain_words(named)
            self._start(ticket, PLAIN, lambda done: average_plainly(buffer, words, self.channel, done, ready))
        else:
            soon = [(name, g) for name, g in named if not self.ways[name].late]
            for kind, message in self._messages(soon, ready):
                self._start(ticket, kind, functools.partial(submit, message, self.channel))
            if last:
                for kind, message in self._messages(sorted(self._late, key=lambda item: item[0]), ready):
                    self._start(None, kind, functools.partial(submit, message, self.channel))
        if last and self._counts is not None:
            refresh = functools.partial(self.books.refresh, self._counts, self.number, self._limit, self.channel)
            self._start(None, "code books", refresh)
        if last and self.check:
            checks.compare_results(self.results, self.number, self._complete, self.channel, self._checked)
        if last:
            self._last_came = time.perf_counter()
            self._ended(None, None, Outcome())
        self._all_started(ticket)
        if self.totals.error is not None:  # it failed before it knew of this bucket
            self.fail(self.totals.error)
        return future

    def _keep_own(self, named: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
        """Gradients of a single rank are their own mean, with what was held back of them before; returns the rest."""
        left = []
        for name, gradient in named:
            way = self.ways[name]
            if way.codec.transforms:
                left.append((name, gradient))
                continue
            if self.memory.residuals:
                total = self.memory.compensated(name, gradient, self.scale)
                if total is not gradient:
                    gradient.copy_(total)
                self.memory.lost(name, None)
                self.totals.finite &= all_finite([gradient])
        return left

    def _plain_words(self, named: list[tuple[str, torch.Tensor]]) -> str:
        first, numel = named[0][0], sum(g.numel() for _, g in named)
        return f"plain averaging at step {self.number} of {first!r} and {len(named) - 1} more, {numel} values"

    def _messages(
        self, named: list[tuple[str, torch.Tensor]], ready: torch.cuda.Event | None
    ) -> list[tuple[str, Message]]:
        """The gradients in messages of equal codec, route and type, in the order of first appearance."""
        messages: dict[tuple[str, torch.dtype], Message] = {}
        rank, world = self.channel.rank, self.channel.world
        for name, gradient in named:
            way = self.ways[name]
            key = (way.kind, gradient.dtype)
            message = messages.get(key)
            shared = self._limit > 0 and shares_book(way.codec)
            if message is None:
                message = messages[key] = Message(
                    way.codec,
                    way.route,
                    [],
                    [],
                    self.memory,
                    self.scale,
                    self.words,
                    ready,
                    self._counts if shared else None,
                    self._must_be_lossless,
                )
            if shared:
                state: dict[str, Any] = {"book": self._book}
            else:
                state = {} if isinstance(way.codec, Identity) else self.memory.state(name, way.codec.name)
            self.memory.forms[name] = way.form
            message.tensors.append(gradient)
            message.contexts.append(Context(name, self.number, 0, rank, world, self.scale, way.floor, state=state))
        _join_factors(messages)
        return [(kind, message) for (kind, _), message in messages.items()]

    # -- whether all ranks see the same --------------------------------------------------------------------------

    def compare(self, joined: bool, warn: Callable[[str], None]) -> None:
        """At the beginning: tells the other ranks whether this one takes part, and its grids. The answer comes later.

        `joined` is for a rank that has run out of inputs and only keeps the others company.
        """
        if self.alone:
            return
        floors = {name: way.floor for name, way in self.ways.items() if way.floor is not None}
        if floors or self.learns:
            self._comparison = checks.Comparison(floors, joined, self.number, self.channel, warn)

    def _must_be_lossless(self) -> bool:
        """Waits for the other ranks' grids; True if they differ from this one's."""
        return self._comparison is not None and not self._comparison.grids_agree()

    def one_has_joined(self) -> bool:
        """Whether a rank took no part, as far as it was asked."""
        return self._comparison is not None and self._comparison.one_has_joined()

    # -- on the channel's threads -------------------------------------------------------------------------------

    def _start(self, ticket: _Ticket | None, kind: str, submit: Callable[[Callable[[Outcome], None]], Any]) -> None:
        with self._lock:
            self._open += 1
            if ticket is not None:
                ticket.left += 1
        submit(functools.partial(self._ended, ticket, kind))

    def _all_started(self, ticket: _Ticket) -> None:
        """No more messages carry this bucket; all may be through already."""
        with self._lock:
            ticket.left -= 1
        if ticket.left == 0 and not ticket.held and ticket.error is None:
            _give(ticket)

    def _ended(self, ticket: _Ticket | None, kind: str | None, outcome: Outcome) -> None:
        """A message of that kind is through, or all buckets have come."""
        with self._lock:
            self.totals.add(outcome)
            if kind is not None:
                self.parts.setdefault(kind, Outcome()).add(outcome)
            self._open -= 1
            if ticket is not None:
                ticket.left -= 1
            complete = self._open == 0
        if outcome.error is not None:
            self.fail(outcome.error)
            return
        if complete:
            self._complete.set()
            if not self.check:
                self._finish()
        elif ticket is not None and ticket.left == 0 and not ticket.held:
            _give(ticket)  # after the end of the step, where this is it: DDP goes on at once

    def _checked(self, outcome: Outcome) -> None:
        self.totals.add(outcome)
        self.fail(outcome.error) if outcome.error is not None else self._finish()

    def _finish(self) -> None:
        self.exposed = time.perf_counter() - self._last_came if self._last_came is not None else 0.0
        self.memory.commit() if self.totals.finite else self.memory.drop()
        if self.alone:
            for kind in {way.kind for way in self.ways.values()}:
                self.parts.setdefault(kind, Outcome())
        self.on_end(self)
        if self._elsewhere is not None:
            self._elsewhere.end()
        for ticket in self._tickets:
            _give(ticket)

    def fail(self, error: BaseException) -> None:
        """Every bucket that DDP still waits for raises."""
        with self._lock:
            self.totals.error = self.totals.error or error
        self._complete.set()
        self.on_end(self)
        if self._elsewhere is not None:
            self._elsewhere.end()
        for ticket in list(self._tickets):
            _give(ticket, error)


def _join_factors(messages: dict[tuple[str, torch.dtype], Message]) -> None:
    """Uncompressed tensors travel with factors of their type, as PowerSGD's paper has it: one message, not two."""
    hosts = {dtype: message for (_, dtype), message in reversed(messages.items()) if message.route == FACTORS}
    for kind, dtype in list(messages):
        if kind == PLAIN and dtype in hosts:
            guest, host = messages.pop((kind, dtype)), hosts[dtype]
            host.tensors += guest.tensors
            host.contexts += guest.contexts


def is_alone(channel: Channel) -> bool:
    """The mean over one rank is what it has: nothing is coded, lost or sent."""
    return channel.world == 1 and os.environ.get(ALONE, "") in ("", "0")


def shares_book(codec: Codec) -> TypeGuard[GComp]:
    return isinstance(codec, GComp) and codec.book == "shared"


def _future(device: torch.device) -> Future:
    return torch.futures.Future(devices=[device]) if device.type == "cuda" else torch.futures.Future()


def _give(ticket: _Ticket, error: BaseException | None = None) -> None:
    if not ticket.given:
        ticket.given, ticket.error = True, error
        ticket.done.set_result(ticket.buffer)


def _buffer_or_raise(ticket: _Ticket, done: torch.futures.Future[Any]) -> torch.Tensor:
    """Raising here, in a callback, gives backward a RuntimeError with the text of the error; set_exception does not."""
    if ticket.error is not None:
        raise ticket.error
    return ticket.buffer
