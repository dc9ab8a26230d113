"""One backward pass on the host runner: gradients become messages, and DDP gets its buckets back.

Gradients of equal codec and route in a bucket form a message. Factors and small uncompressed tensors wait for the last
bucket and travel together, in the order of parameter names: a few collectives for the whole step, and the same result
however DDP cuts its buckets. What a step changes in Memory counts only if its gradients proved finite on all ranks.

Ranks compare what they do in rows (rows.py). Where gradients lie on a GPU, DDP may have its buckets while the GPU still
works on them. The stream runner's pass is exchange/on_stream/backward.py.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ...errors import PeerError
from ...feedback import Memory
from ...sensitivity.shape import SecondMoments
from ...spans import until
from .. import coding, comparisons, plain, rounds
from ..finiteness import all_finite
from ..gradients import Bucket, Draft, Future, Late, Named, Whole, done_future, new_future
from ..outcome import Outcome
from ..peers.channel import Channel
from ..peers.gloo import Broken
from ..shared_book import SharedBook
from ..way import PLAIN, Scheme
from . import streams
from .rounds import submit_at_once, submit_rounds
from .rows import Row, rows_of
from .runner import runner_of

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
class Ticket:
    """A bucket that DDP waits for."""

    buffer: torch.Tensor
    promise: _Promise  # that all who wait for the end of the step have in common
    held: bool  # it waits for that
    error: BaseException | None
    left: int = 1  # messages that it waits for, and one for those still to be started

    def give(self) -> None:
        self.promise.keep(self.buffer)


_Start = Callable[[Callable[[Outcome], None]], None]  # of a message; it is told what came of it


def _nobody(text: str) -> None:
    """Nobody is warned."""


@dataclass
class Attached:
    """What all backward passes of a model have in common."""

    channel: Channel
    memory: Memory
    on_end: Callable[[HostBackward], None]
    warn: Callable[[str], None] = _nobody
    group: dist.ProcessGroup | None = None  # DDP's own, for what torch adds up itself
    check: bool = False  # compare the results of all ranks at the end of each pass
    learns: bool = False  # the policy wants to see the means
    books: SharedBook = field(default_factory=SharedBook)
    late: Late = field(default_factory=Late)
    shapes: SecondMoments = field(default_factory=lambda: SecondMoments([], {}))
    floor_samples: comparisons.FloorSamples = field(default_factory=comparisons.FloorSamples)
    shapes_version: object = None  # another one when other gradients have a shape


class HostBackward:
    """`take` is called on the thread of backward, the rest happens on the channel's threads."""

    def __init__(
        self,
        number: int,
        scale: float,
        scheme: Scheme,
        attached: Attached,
        rates: Sequence[float] = (),
        agreed: bool = False,
        joined: bool = False,
        joins: bool = False,
    ) -> None:
        """`rates` are the optimizer's. `agreed`: all ranks have said that they send such steps uncompressed.

        `joined`: this rank has run out of inputs and only keeps the others company; `joins`: some rank may.
        """
        self.number, self.scale, self.scheme, self.rates = number, scale, scheme, list(rates)
        self.ways, self.attached = scheme.ways, attached
        self.channel, self.memory, self.shapes = attached.channel, attached.memory, attached.shapes
        self.plain = scheme.plain and not self.memory.residuals  # nothing is compressed: as DDP does it by itself
        self.learns, self._joined, self._joins, self._agreed = attached.learns, joined, joins, agreed
        self.totals = Outcome()
        self.raw_bytes = 0  # of the buckets
        self.parts: dict[str, Outcome] = {}  # of the totals, by codec and route
        self.exposed = 0.0  # seconds from the last bucket's arrival to the end
        self.results: Named = []  # where the means will be
        self.gave_early = False  # DDP had its buckets before all was known to be well
        self.over = threading.Event()  # on_end has been called, and Memory is that of the next step
        self._lock = threading.RLock()
        self._waiting: list[Bucket] = []  # those with gradients that wait for the last bucket
        self._tickets: list[Ticket] = []
        self._end: _Promise | None = None  # of the step
        self._open = 1  # messages under way, and one for the buckets still to come
        self._complete = threading.Event()  # all messages are through
        self._last_came: float | None = None
        self.alone = is_alone(self.channel)
        self.check = attached.check and not self.alone
        self._idle = self.alone and not self.learns and not self.memory.residuals and not self._transforms()
        looked_at = self.alone or self.learns or self.check
        self.by_torch = self.plain and agreed and attached.group is not None and not looked_at
        self._on_device = streams.are_needed(self.channel.device)
        # DDP may have its buckets before all is known to be well, where nobody here looks at means.
        self._early = self._on_device and not (self.learns or scheme.graded or scheme.plain)
        self._began = _enqueued_so_far(self.channel.device)
        self._rows: list[Row] = []  # by which ranks agree on what this step sends
        self._grids_differ = self._shapes_differ = self._one_joined = False
        self._floors = {name: way.floor for name, way in self.ways.items() if way.floor is not None}
        self._compares_shapes = scheme.shaped and (bool(self.shapes.names) or joins)
        self._book = attached.books.at(number) if scheme.book_limit else None
        wanted = bool(scheme.book_limit) and attached.books.wants(number, scheme.book_refresh) and not self.alone
        self._counts = torch.zeros(256, dtype=torch.int64) if wanted else None
        self._to_count = 0  # whole messages that have not told their counts yet
        self._counted = threading.Condition()

    def _transforms(self) -> bool:
        return any(way.codec.transforms for way in self.ways.values())

    def take_buffer(self, buffer: torch.Tensor, last: bool) -> Future | None:
        """Takes a bucket of which no single gradient has to be known; None: `take` it."""
        if not self._idle and not self.by_torch:
            return None
        self.raw_bytes += buffer.nbytes
        future = self._averaged(buffer) if self.by_torch else done_future(buffer)
        if last:
            self._last_came = time.perf_counter()
            self._ended(None, None, Outcome())
        return future

    def take_sparse(self, gradient: torch.Tensor, group: dist.ProcessGroup, last: bool) -> Future:
        """Takes a bucket of one sparse gradient. torch averages it, as DDP does by itself: no codec reads such."""
        future = done_future(gradient)
        if self.channel.world > 1:
            with self._lock:
                self._open += 1
            gradient.div_(self.channel.world)
            if gradient.device.type == "cpu":
                work = self.channel.gloo.add_sparse(gradient)
            else:
                work = dist.all_reduce(gradient, group=group, async_op=True)
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
            raise PeerError(str(outcome.error)) from error
        finally:
            self._ended(None, SPARSE, outcome)

    def _averaged(self, buffer: torch.Tensor) -> Future:
        """By torch. Over Gloo it waits for ever for a rank that does something else: the ticket ends that, too."""
        assert self.attached.group is not None
        if plain.backend_of(self.attached.group, buffer.device) == "nccl":
            self._agree_on_plain()
            with self._lock:
                self._open += 1
            done = runner_of(self.channel).expect(functools.partial(self._ended, None, PLAIN))
            return plain.average(buffer, self.attached.group, self.channel, done)
        ticket, future = self._ticket(buffer, f"at step {self.number} of {buffer.numel()} values")
        self._start(ticket, PLAIN, functools.partial(self._average, buffer))
        self._all_started(ticket)
        if self.totals.error is not None:
            self.fail(self.totals.error)
        return future

    def _average(self, buffer: torch.Tensor, done: Callable[[Outcome], None]) -> None:
        """The same, for whoever waits until the mean is there, on a GPU as well."""
        self._agree_on_plain()
        assert self.attached.group is not None
        plain.average(buffer, self.attached.group, self.channel, runner_of(self.channel).expect(done), wait=True)

    def _agree_on_plain(self) -> None:
        if not self._rows:
            self._agree("plain averaging by torch")
            if not self._agreed:  # a rank that does something else would leave torch's sum waiting
                self._wait_for_agreement()

    def _ticket(self, buffer: torch.Tensor, of: str, held: bool = False) -> tuple[Ticket, Future]:
        if held and self._end is None:
            self._end = _Promise(buffer.device)
        promise = self._end if held and self._end is not None else _Promise(buffer.device)
        with self._lock:  # or `fail` would miss it
            ticket = Ticket(buffer, promise, held, self.totals.error)
            self._tickets.append(ticket)
        until(promise.future, "exchange", of)
        return ticket, promise.future.then(functools.partial(_buffer_or_raise, ticket))

    def take(self, buffer: torch.Tensor, named: Named, last: bool) -> Future:
        """Takes a bucket in hand and returns at once; the future is its averaged buffer."""
        named = named if isinstance(named, Bucket) else Bucket(named)
        self.results += named
        if self.scheme.all_late and not self.alone:
            return self._take_late(buffer, named, last)
        of = self._words_for(named)
        if self.alone:
            named = self._keep_own(named)
        as_it_is = self.plain and not self.alone
        late, _, whole = ([], [], []) if as_it_is else named.parted(self.ways)
        if late:
            self._waiting.append(named)
        # Until the end of the step, where somebody still looks at means then: DDP returns with the last bucket.
        held = bool(late) or self.check or (last and not self._early)
        ticket, future = self._ticket(buffer, of, held)
        self.raw_bytes += buffer.nbytes
        ready = None
        if buffer.device.type == "cuda" and (last or len(late) < len(named)):
            ready = torch.cuda.current_stream(buffer.device).record_event()
        if as_it_is:
            self._start(ticket, PLAIN, functools.partial(self._average, buffer))
        else:
            for draft in named.drafts(self.ways, self.channel.rank, self.channel.world):
                self._start(ticket, draft.kind, functools.partial(self._submit_draft, draft, ready))
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
        drafts = self.attached.late.drafts(self._waiting, self.ways, rank, world) if self._waiting else []
        starts: list[tuple[str, _Start]] = []
        starts += [(draft.kind, functools.partial(self._submit_draft, draft, ready)) for draft in drafts]
        if self._counts is not None:
            self.attached.books.expect(self.number)
            starts.append(("code books", self._send_counts))
        if starts:
            with self._lock:  # they count before any is through, in place of buckets: the first may be the last
                self._open += len(starts) - 1
        for kind, start in starts:
            start(functools.partial(self._ended, None, kind))
        if self.check:
            self._compare_results()
        self._agree_if_silent()
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

    def _submit_whole(self, whole: Whole, ready: torch.cuda.Event | None, done: Callable[[Outcome], None]) -> None:
        """Sends gradients that are coded as one message."""
        channel, runner = self.channel, runner_of(self.channel)
        self._agree_on(whole.described)
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
                message.shapes = whole.shapes(self.shapes, self.attached.shapes_version)

        program, then = whole.program(channel.topology), (self._wait_for_agreement, ready, self._means_follow)
        runner.submit(program, whole.values, message, done, begin, *then, self._when_agreed)

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

    def _submit_draft(self, draft: Draft, ready: torch.cuda.Event | None, done: Callable[[Outcome], None]) -> None:
        """Sends gradients of a draft: as one message, or in rounds."""
        self.memory.forms |= draft.forms
        if draft.whole is not None:
            self._submit_whole(draft.whole, ready, done)
            return
        for context in draft.dated:
            context.step, context.scale = self.number, self.scale
        for context in draft.stateful:
            context.state = self.memory.state(context.name, draft.codec.name)
        self._submit_rounds(draft, ready, done)

    def _submit_rounds(self, draft: Draft, ready: torch.cuda.Event | None, done: Callable[[Outcome], None]) -> None:
        assert draft.prepared is not None
        self._agree_on(draft.described)
        names, tensors, channel, by = draft.prepared.names, draft.tensors, self.channel, draft.prepared.in_place
        about = coding.Message(names, tensors[0].dtype, channel.rank, channel.world, self.number)
        what, agreed = f"{draft.described} at step {self.number}", self._wait_for_agreement
        if by is not None:
            kept = draft.codec.name, names, tensors, self.memory, self.scale
            work = functools.partial(rounds.in_place, by, *kept, self._means_follow)
            submit_at_once(runner_of(channel), what, work, about, done, agreed, ready, self._when_agreed)
            return
        about_step = draft.contexts, self.memory, self.scale, draft.prepared.averaged
        start = functools.partial(rounds.of, draft.codec, tensors, *about_step)
        submit_rounds(runner_of(channel), what, start, about, done, agreed, ready, self._when_agreed)

    # -- whether all ranks see and do the same -------------------------------------------------------------------

    def _agree_on(self, described: str) -> None:
        """Has all ranks say that they send this: the first message of a step, and those that are new on the channel.

        Others are of the scheme that the first row names and of buckets that DDP leaves as they are.
        """
        runner = runner_of(self.channel)
        if not self._has_agreed() or described not in runner.agreed:
            self._agree(described)
            runner.agreed.add(described)

    def _has_agreed(self) -> bool:
        """Whether ranks have told each other something of this step."""
        return bool(self._rows)

    def _agree(self, what: str) -> None:
        """Has all ranks say what they do, beside the messages; with the first row of a step goes all that is known."""
        text, first = f"{what} at step {self.number} ({self.scheme.words})", not self._rows
        if not first:
            row = Row(text, self.fail)
        elif self._floors or self._compares_shapes or self.learns:
            row = Row(self._first_text(text), self.fail, self._own_numbers, self._compare)
        else:
            row = Row(self._first_text(text), self.fail)
        self._rows.append(row)
        rows_of(self.channel).submit(row)

    def _first_text(self, text: str) -> str:
        floors, shapes = len(self._floors), len(self.shapes.all_names) if self._compares_shapes else 0
        return f"{text}; codecs by parameter have the digest {self.scheme.digest}, with {floors} grids, {shapes} shapes"

    def _agree_if_silent(self) -> None:
        """A step without messages, as of sparse gradients alone, is compared as well."""
        if not (self._has_agreed() or self.alone):
            self._agree("nothing")

    def _wait_for_agreement(self) -> None:
        """Returns when all ranks have said that they send the same messages in this step."""
        for row in list(self._rows):
            row.over.wait()
        if self.channel.error is not None:
            raise self.channel.error

    def _when_agreed(self, tell: Callable[[], None]) -> None:
        """Calls when all ranks have said so; rows are heard in their order."""
        self._rows[-1].then(tell) if self._rows else tell()

    def _own_numbers(self) -> torch.Tensor:
        """Whether this rank has joined, and its grids and shapes, of which a sample is looked at."""
        joined, floors = torch.tensor([int(self._joined)]), list(self._floors.values())
        with self._stream() as stream:  # a GPU is busy with backward, for which this need not wait
            stream.after(self._began)
            shapes = [self.shapes.sums(self.number)] if self._compares_shapes else []
            return torch.cat([joined, self.attached.floor_samples.sums(floors, self.number), *shapes])

    def _stream(self) -> streams.Stream:
        """Of this thread, where it may ask the device for numbers."""
        return streams.own(self.channel.device) if self._on_device else streams.HOST

    def _compare(self, rows: Sequence[torch.Tensor]) -> None:
        """Where grids or shapes differ, or a rank has joined, this step does without them on all ranks."""
        rank, warn, floors = self.channel.rank, self.attached.warn, len(self._floors)
        gone = rank if self._joined else next((other for other, row in enumerate(rows) if row[0]), None)
        if gone is not None:
            self._one_joined = True
            for instead in [comparisons.LOSSLESS] * bool(floors) + [comparisons.UNSHAPED] * bool(self.shapes.names):
                warn(comparisons.about_joined(gone, instead))
            return
        if found := comparisons.differences([row[1 : 1 + floors] for row in rows], rank, list(self._floors)):
            self._grids_differ = True
            warn(comparisons.about_grids(*found[0], rank, comparisons.LOSSLESS))
        names = self.shapes.all_names if self._compares_shapes else []
        if found := comparisons.differences([row[1 + floors :] for row in rows], rank, names):
            self._shapes_differ = True
            warn(comparisons.about_grids(*found[0], rank, comparisons.UNSHAPED))

    def _shapes_agree(self) -> bool:
        """Waits for the other ranks' shapes; False if they differ from this one's, or there are none."""
        if not self._compares_shapes:
            return False
        return not self.one_has_joined() and not self._shapes_differ

    def _must_be_lossless(self) -> bool:
        """Waits for the other ranks' grids; True if they differ from this one's."""
        return self.one_has_joined() or self._grids_differ

    def one_has_joined(self) -> bool:
        """Whether a rank took no part, as far as it was asked. If others have failed, so will whatever comes next."""
        if self._rows:
            self._rows[0].over.wait()
        return self._one_joined

    def _compare_results(self) -> None:
        """Has all ranks compare the means once they are there: all must have the same bits."""
        names = [name for name, _ in self.results]

        def numbers() -> torch.Tensor:
            self._complete.wait()
            if self.channel.error is not None:
                raise self.channel.error
            with self._stream():
                return torch.tensor([comparisons.bit_sum(tensor) for _, tensor in self.results])

        def heard(rows: Sequence[torch.Tensor]) -> None:
            found = comparisons.differences(rows, self.channel.rank, names)
            comparisons.check_results(found, self.number, self.channel.rank, len(names))
            self._checked(Outcome())

        what = f"a comparison of {len(names)} results at step {self.number}"
        rows_of(self.channel).submit(Row(what, self.fail, numbers, heard))

    def _send_counts(self, done: Callable[[Outcome], None]) -> None:
        """Adds up the exponents that all ranks have counted, for the next shared book."""

        def heard(rows: Sequence[torch.Tensor]) -> None:
            self.attached.books.make(torch.stack(list(rows)).sum(0), self.scheme.book_limit)
            size, groups = rows[0].nbytes, self.channel.groups
            neighbours = groups["intra"].size if "intra" in groups else 1
            done(Outcome(bytes_sent=size * (len(rows) - 1), bytes_out=size * (len(rows) - neighbours)))

        what = f"the code book of step {self.number}"
        rows_of(self.channel).submit(Row(what, self.fail, self._all_counts, heard))

    # -- on the channel's threads -------------------------------------------------------------------------------

    def _start(self, ticket: Ticket, kind: str, submit: Callable[[Callable[[Outcome], None]], Any]) -> None:
        with self._lock:
            self._open += 1
            ticket.left += 1
        submit(functools.partial(self._ended, ticket, kind))

    def _all_started(self, ticket: Ticket) -> None:
        """No more messages carry this bucket; all may be through already."""
        with self._lock:
            ticket.left -= 1
        if ticket.left == 0 and not ticket.held and ticket.error is None:
            ticket.give()

    def _ended(self, ticket: Ticket | None, kind: str | None, outcome: Outcome) -> None:
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
        """All that makes a message's means is on the current stream. If it is the last one, DDP goes on behind it.

        Whether the means are finite is still to be seen: Memory waits for that, and so does the next backward pass.
        """
        with self._lock:
            last = self._open == 1 and self.totals.error is None
            self.gave_early = last and self._early and not self.check
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
            self.attached.on_end(self)
        except BaseException as error:  # of a policy that learns, or of a GPU: DDP must not wait for ever
            self.fail(self.channel.explained(error))
            raise
        finally:
            self.over.set()
        for ticket in self._tickets:
            ticket.give()

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
            self.attached.on_end(self)
        finally:
            self.over.set()
        for ticket in list(self._tickets):
            ticket.give()


def _enqueued_so_far(device: torch.device) -> streams.Mark:
    """What this thread has a GPU do before it goes on."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def is_alone(channel: Channel) -> bool:
    """The mean over one rank is what it has: nothing is coded, lost or sent."""
    return channel.world == 1 and os.environ.get(ALONE, "") in ("", "0")


def _buffer_or_raise(ticket: Ticket, done: torch.futures.Future[Any]) -> torch.Tensor:
    """Raising here, in a callback, gives backward a RuntimeError with the text of the error; set_exception does not."""
    if ticket.error is not None:
        raise ticket.error
    return ticket.buffer
