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
from typing import Any

import torch
import torch.distributed as dist

from . import checks
from .codecs import Context
from .codecs.baseline import Identity
from .collectives import Elsewhere, Job, Message, PipelineChannel, average_plainly, submit
from .collectives.message import no_steps
from .collectives.pipeline import Agreement
from .exchange import coding, rounds
from .exchange.codecs import codes_messages
from .exchange.finiteness import all_finite
from .exchange.gloo import Broken
from .exchange.on_host import runner_of
from .exchange.outcome import Outcome
from .exchange.rounds_on_host import submit_rounds
from .feedback import Memory
from .gradients import PLAIN, Bucket, Draft, Future, Late, Named, Way, Whole, done_future, new_future, shares_book
from .refresh import SharedBook
from .sensitivity.shape import SecondMoments
from .spans import until

SPARSE = "sparse gradients by torch"  # what `stats` calls them
ALONE = "GRADZIP_ALONE"  # set to 1: a rank without any other codes its gradients as well, to see what becomes of them


class _Promise:
    """A future that is kept once, whoever comes first."""

    def __init__(self, device: torch.device) -> None:
        self.future = new_future(device)
        self._open = threading.Lock()

    @property
    def kept(self) -> bool:
        return self._open.locked()

    def keep(self, buffer: torch.Tensor) -> None:
        if self._open.acquire(blocking=False):
            self.future.set_result(buffer)


@dataclass(eq=False)
class _Ticket:
    """A bucket that DDP waits for."""

    buffer: torch.Tensor
    promise: _Promise  # that all who wait for the end of the step have in common
    held: bool  # it waits for that
    error: BaseException | None
    left: int = 1  # messages that it waits for, and one for those still to be started

    def give(self) -> None:
        self.promise.keep(self.buffer)


@dataclass(eq=False)
class Backward:
    """`take` is called on the thread of backward, the rest happens on the channel's threads."""

    number: int
    scale: float
    ways: dict[str, Way]  # by parameter name
    plain: bool  # nothing is compressed: as DDP does it by itself
    words: str  # the policy, for the agreement between ranks
    channel: PipelineChannel
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
    late: Late = field(default_factory=Late)
    early: bool = False  # DDP may have its buckets while the GPU still works on them: nobody here looks at means
    all_late: bool = False  # every gradient waits for the last bucket
    book_limit: int = 0  # of codes in the shared book; 0: nobody uses one
    shapes: SecondMoments = field(default_factory=lambda: SecondMoments([], {}))
    shapes_version: object = None  # another one when other gradients have a shape
    book_refresh: int = 50  # steps between two shared books

    def __post_init__(self) -> None:
        self._lock = threading.RLock()
        self._waiting: list[Bucket] = []  # those with gradients that wait for the last bucket
        self.results: Named = []  # where the means will be
        self._tickets: list[_Ticket] = []
        self._end: _Promise | None = None  # of the step
        self.gave_early = False
        self.over = threading.Event()  # on_end has been called, and Memory is that of the next step
        self._open = 1  # messages under way, and one for the buckets still to come
        self._complete = threading.Event()  # all messages are through
        self._comparison: checks.Comparison | None = None
        self._shape_comparison: checks.Comparison | None = None
        self._agreements: list[Job] = []  # of all ranks on what whole messages this step sends
        self._last_came: float | None = None
        self.alone = is_alone(self.channel)
        self.check &= not self.alone
        self._idle = self.alone and not self.learns and not self.memory.residuals and not self._transforms()
        self._elsewhere: Elsewhere | None = None
        if self.plain and self.group is not None and not (self.alone or self.learns or self.check):
            what = f"plain averaging at step {self.number} by torch ({self.words})"
            self._elsewhere = Elsewhere(what, self.group, self.channel, self.fail)
        self._book = self.books.at(self.number) if self.book_limit else None
        wanted = bool(self.book_limit) and self.books.wants(self.number, self.book_refresh) and not self.alone
        self._counts = torch.zeros(256, dtype=torch.int64) if wanted else None
        self._to_count = 0  # whole messages that have not told their counts yet
        self._counted = threading.Condition()

    def _transforms(self) -> bool:
        return any(way.codec.transforms for way in self.ways.values())

    def take_whole(self, buffer: torch.Tensor, last: bool) -> Future | None:
        """Takes a bucket of which no single gradient has to be known; None: `take` it."""
        if not self._idle and self._elsewhere is None:
            return None
        self.raw_bytes += buffer.nbytes
        future = done_future(buffer) if self._elsewhere is None else self._averaged(buffer, self._elsewhere)
        if last:
            self._last_came = time.perf_counter()
            self._ended(None, None, Outcome())
        return future

    def take_sparse(self, gradient: torch.Tensor, group: dist.ProcessGroup, last: bool) -> Future:
        """Takes a bucket of one sparse gradient. torch averages it, as DDP does by itself: no codec reads such."""
        future = done_future(gradient)
        if not self.alone:
            with self._lock:
                self._open += 1
            work = dist.all_reduce(gradient.div_(self.channel.world), group=group, async_op=True)
            future = work.get_future().then(self._sparse_ended)
        if last:
            on_gpu = gradient.device.type == "cuda"
            self._all_came(torch.cuda.current_stream(gradient.device).record_event() if on_gpu else None)
        return future

    def _sparse_ended(self, future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        outcome = Outcome(collectives=1)
        try:
            mean = future.value()[0]
            outcome.finite = all_finite([mean._values()])
            return mean
        except Exception as error:
            outcome.error = self.channel.explained(Broken(None, error))
            raise
        finally:
            self._ended(None, SPARSE, outcome)

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

    def _ticket(self, buffer: torch.Tensor, of: str, held: bool = False) -> tuple[_Ticket, Future]:
        if held and self._end is None:
            self._end = _Promise(buffer.device)
        promise = self._end if held and self._end is not None else _Promise(buffer.device)
        with self._lock:  # or `fail` would miss it
            ticket = _Ticket(buffer, promise, held, self.totals.error)
            self._tickets.append(ticket)
        until(promise.future, "exchange", of)
        return ticket, promise.future.then(functools.partial(_buffer_or_raise, ticket))

    def take(self, buffer: torch.Tensor, named: Named, last: bool) -> Future:
        """Takes a bucket in hand and returns at once; the future is its averaged buffer."""
        named = named if isinstance(named, Bucket) else Bucket(named)
        self.results += named
        if self.all_late and not self.alone:
            return self._take_late(buffer, named, last)
        of = self._words_for(named)
        if self.alone:
            named = self._keep_own(named)
        plain = self.plain and not self.alone
        late, soon, whole = ([], named, []) if plain else named.parted(self.ways)
        if late:
            self._waiting.append(named)
        # Until the end of the step, where somebody still looks at means then: DDP returns with the last bucket.
        held = bool(late) or self.check or (last and not self.early)
        ticket, future = self._ticket(buffer, of, held)
        self.raw_bytes += buffer.nbytes
        ready = None
        if buffer.device.type == "cuda" and (last or len(late) < len(named)):
            ready = torch.cuda.current_stream(buffer.device).record_event()
        if plain:
            words = self._plain_words(named)
            self._start(ticket, PLAIN, lambda done: average_plainly(buffer, words, self.channel, done, ready))
        else:
            for kind, message in self._messages(soon, ready):
                self._start(ticket, kind, functools.partial(self._submit, message))
            for together in whole:
                self._start(ticket, together.kind, functools.partial(self._submit_whole, together, ready))
        if last:
            self._all_came(ready)
        self._all_started(ticket)
        if self.totals.error is not None:  # it failed before it knew of this bucket
            self.fail(self.totals.error)
        return future

    def _take_late(self, buffer: torch.Tensor, named: Bucket, last: bool) -> Future:
        """A bucket of a step in which all wait for the last one.

        DDP waits for its first bucket before it looks at any other: only that one's future has to wait.
        """
        self._waiting.append(named)
        self.raw_bytes += buffer.nbytes
        future = named.done(buffer) if self._tickets else self._ticket(buffer, self._words_for(named), held=True)[1]
        if last:
            on_gpu = buffer.device.type == "cuda"
            self._all_came(torch.cuda.current_stream(buffer.device).record_event() if on_gpu else None)
        return future

    def _all_came(self, ready: torch.cuda.Event | None) -> None:
        """Starts what waited for the last bucket; the gradients are there when the event is."""
        self._last_came = time.perf_counter()
        rank, world = self.channel.rank, self.channel.world
        drafts = self.late.drafts(self._waiting, self.ways, rank, world) if self._waiting else []
        starts = [(draft.kind, functools.partial(self._submit_late, draft, ready)) for draft in drafts]
        if self._counts is not None:
            about = self.number, self.book_limit, self.channel
            refresh = functools.partial(self.books.refresh, self._all_counts, *about)
            starts.append(("code books", refresh))
        if starts:
            with self._lock:  # they count before any is through, in place of buckets: the first may be the last
                self._open += len(starts) - 1
        for kind, start in starts:
            start(functools.partial(self._ended, None, kind))
        if self.check:
            checks.compare_results(self.results, self.number, self._complete, self.channel, self._checked)
        if not starts:
            self._ended(None, None, Outcome())

    def _words_for(self, named: Named) -> str:
        return f"at step {self.number} of {named[0][0]!r} and {len(named) - 1} more"

    def _keep_own(self, named: Named) -> Bucket:
        """Gradients of a single rank are their own mean, with what was held back of them before; returns the rest."""
        left = Bucket()
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

    def _plain_words(self, named: Named) -> str:
        return f"plain averaging {self._words_for(named)}, {sum(g.numel() for _, g in named)} values"

    def _messages(self, named: Named, ready: torch.cuda.Event | None) -> list[tuple[str, Message]]:
        """The gradients in messages of equal codec, route and type, in the order of first appearance."""
        messages: dict[tuple[str, torch.dtype], Message] = {}
        rank, world = self.channel.rank, self.channel.world
        for name, gradient in named:
            way = self.ways[name]
            key = (way.kind, gradient.dtype)
            message = messages.get(key)
            shared = self.book_limit > 0 and shares_book(way.codec)
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
        return [(kind, message) for (kind, _), message in messages.items()]

    def _submit_whole(self, whole: Whole, ready: torch.cuda.Event | None, done: Callable[[Outcome], None]) -> None:
        """Sends gradients that are coded as one message."""
        channel, runner = self.channel, runner_of(self.channel)
        if not self._agreements or whole.described not in runner.agreed:  # the first of a step, and new ones
            self._agree(f"{whole.described} at step {self.number} ({self.words})")
            runner.agreed.add(whole.described)
        message = coding.Message(whole.names, whole.dtype, channel.rank, channel.world, self.number)
        message.scale, message.memory, message.book = self.scale, self.memory, self._book
        floors = [self.ways[name].floor for name in whole.names]
        if any(floor is not None for floor in floors):
            message.floors = floors
        if self._counts is not None and whole.shares_book:
            message.count, self._to_count = self._count, self._to_count + 1

        def begin() -> None:
            message.lossless = bool(message.floors) and self._must_be_lossless()
            if self._shapes_agree():
                message.shapes = whole.shapes(self.shapes, self.shapes_version)

        program = whole.program(channel.topology)
        runner.submit(program, whole.values, message, done, begin, self._wait_for_agreement, ready, self._means_follow)

    def _agree(self, what: str) -> None:
        """Has all ranks say what they do, beside the messages."""
        job = Job(Agreement(what), no_steps(), self._lost)
        self._agreements.append(job)
        self.channel.pipeline.submit(job, elsewhere=True)

    def _lost(self, job: Job, error: BaseException | None) -> None:
        if error is not None:
            self.fail(error)

    def _wait_for_agreement(self) -> None:
        """Returns when all ranks have said that they send the same messages in this step."""
        for job in list(self._agreements):
            job.agreement.reached.wait()
        if self.channel.error is not None:
            raise self.channel.error

    def _count(self, counts: torch.Tensor) -> None:
        """Takes the exponents of a message."""
        with self._counted:
            assert self._counts is not None
            self._counts += counts
            self._to_count -= 1
            self._counted.notify_all()

    def _all_counts(self) -> torch.Tensor:
        """Waits until all messages of this rank have told theirs."""
        with self._counted:
            self._counted.wait_for(lambda: self._to_count == 0 or self.totals.error is not None)
            assert self._counts is not None
            return self._counts

    def _submit_late(self, draft: Draft, ready: torch.cuda.Event | None, done: Callable[[Outcome], None]) -> None:
        """Sends what waited for the last bucket, in the order of names."""
        memory, scale = self.memory, self.scale
        memory.forms |= draft.forms
        if draft.whole is not None:
            self._submit_whole(draft.whole, ready, done)
            return
        for context in draft.dated:
            context.step, context.scale = self.number, scale
        for context in draft.stateful:
            context.state = memory.state(context.name, draft.codec.name)
        tensors, contexts = draft.tensors, draft.contexts
        message = Message(draft.codec, draft.route, tensors, contexts, memory, scale, self.words, ready)
        message.prepared, message.enqueued = draft.prepared, self._means_follow
        self._submit(message, done)

    def _submit(self, message: Message, done: Callable[[Outcome], None]) -> None:
        """Sends gradients that are not coded as one message: on CPUs by the host runner, in rounds."""
        in_place = message.prepared is not None and message.prepared.in_place is not None
        in_rounds = codes_messages(message.codec, message.route) is None
        if self.channel.device.type != "cpu" or in_place or not in_rounds:
            submit(message, self.channel, done)
            return
        what, names = message.describe(), [context.name for context in message.contexts]
        self._agree(what)
        about = coding.Message(names, message.dtype, self.channel.rank, self.channel.world, self.number)
        start = functools.partial(rounds.of, message.codec, message.tensors, message.contexts, self.memory, self.scale)
        submit_rounds(runner_of(self.channel), what, start, about, done, self._wait_for_agreement)

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

    def compare_shapes(self, joined: bool, joins: bool, warn: Callable[[str], None]) -> None:
        """At the beginning: the same for the shapes that whole messages are rounded by, if there are any.

        `joins`: a rank may run out of inputs. One that did so early has no shapes, and still has to tell the others.
        """
        if (self.shapes.names or joins) and not self.alone:
            self._shape_comparison = checks.ShapeComparison(self.shapes, joined, self.number, self.channel, warn)

    def _shapes_agree(self) -> bool:
        """Waits for the other ranks' shapes; False if they differ from this one's, or there are none."""
        return self._shape_comparison is not None and self._shape_comparison.grids_agree()

    def _must_be_lossless(self) -> bool:
        """Waits for the other ranks' grids; True if they differ from this one's."""
        return self._comparison is not None and not self._comparison.grids_agree()

    def one_has_joined(self) -> bool:
        """Whether a rank took no part, as far as it was asked."""
        return self._comparison is not None and self._comparison.one_has_joined()

    # -- on the channel's threads -------------------------------------------------------------------------------

    def _start(self, ticket: _Ticket, kind: str, submit: Callable[[Callable[[Outcome], None]], Any]) -> None:
        with self._lock:
            self._open += 1
            ticket.left += 1
        submit(functools.partial(self._ended, ticket, kind))

    def _all_started(self, ticket: _Ticket) -> None:
        """No more messages carry this bucket; all may be through already."""
        with self._lock:
            ticket.left -= 1
        if ticket.left == 0 and not ticket.held and ticket.error is None:
            ticket.give()

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
            ticket.give()  # after the end of the step, where this is it: DDP goes on at once

    def _checked(self, outcome: Outcome) -> None:
        self.totals.add(outcome)
        self.fail(outcome.error) if outcome.error is not None else self._finish()

    def _means_follow(self) -> None:
        """All that makes a message's means is on the current stream. If it is the last message, DDP goes on behind it.

        Whether the means are finite is still to be seen: Memory waits for that, and so does the next backward pass.
        """
        with self._lock:
            last = self._open == 1 and self.totals.error is None
            self.gave_early = last and self.early and not self.check
        if self.gave_early:
            for ticket in self._tickets:
                ticket.give()

    def _finish(self) -> None:
        self.exposed = time.perf_counter() - self._last_came if self._last_came is not None else 0.0
        try:
            self.memory.commit() if self.totals.finite else self.memory.drop()
            if self.alone:
                for kind in {way.kind for way in self.ways.values()}:
                    self.parts.setdefault(kind, Outcome())
            self.on_end(self)
        finally:
            self.over.set()
        self._end_elsewhere()
        for ticket in self._tickets:
            ticket.give()

    def _end_elsewhere(self) -> None:
        """What the pipeline knows of, and does not do itself, is through."""
        if self._elsewhere is not None:
            self._elsewhere.end()
        for job in self._agreements:
            self.channel.pipeline.end(job)

    def fail(self, error: BaseException) -> None:
        """Every bucket that DDP still waits for raises."""
        with self._lock:
            self.totals.error = self.totals.error or error
            for ticket in self._tickets:
                if not ticket.promise.kept:
                    ticket.error = error
        self._complete.set()
        with self._counted:
            self._counted.notify_all()
        try:
            self.on_end(self)
        finally:
            self.over.set()
        self._end_elsewhere()
        for ticket in list(self._tickets):
            ticket.give()


def is_alone(channel: PipelineChannel) -> bool:
    """The mean over one rank is what it has: nothing is coded, lost or sent."""
    return channel.world == 1 and os.environ.get(ALONE, "") in ("", "0")


def _buffer_or_raise(ticket: _Ticket, done: torch.futures.Future[Any]) -> torch.Tensor:
    """Raising here, in a callback, gives backward a RuntimeError with the text of the error; set_exception does not."""
    if ticket.error is not None:
        raise ticket.error
    return ticket.buffer
