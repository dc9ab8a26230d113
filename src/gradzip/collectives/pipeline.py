"""Chunks go through a pipeline: while one is coded, others are on the wire.

A job is a generator that yields what it wants exchanged (see executor.py). Stage i codes until the i-th exchange and
starts it; stage i+1 waits for what comes from the others and goes on. Each stage is a thread that takes jobs strictly
in the order of submission, so what is issued, and in which order, never depends on timing.

All ranks compare a digest of what they are about to do, message by message, in a thread of its own while the first
chunk is under way: earlier, it would keep the thread that codes that chunk waiting. A rank that does something else is
found out there, and everybody raises. How a message is cut up, and how long each part of it can be, follows from what
is agreed: no size has to be asked for, and buffers wait for the data before it is sent. Data that moves before all
agree has the digest in its tag, so that it meets only buffers that were made for it, and nobody looks at what came
until all agree.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import torch

from ..errors import PeerError
from ..exchange.peers.buffers import Buffers
from ..exchange.peers.gloo import Gloo, Pending
from ..exchange.recording import Probe
from ..exchange.topology import Members
from ..spans import span
from .carrier import Carrier, Parcel
from .terms import AllReduce, Exchange, Landing, Parts, Steps

ROW_VERSION = 4  # of rows, tags and cuts: ranks that number or cut data otherwise would wait for each other, or end
STAGES = 6  # exchanges that overlap; a job that needs more does the rest of them in the last stage
IN_FLIGHT = 3  # chunks whose data may be under way in a stage: the wire never idles, and the first is not held up
_EXCHANGES = 1 << 12  # of one job, at the most; part of the tag
_JOBS = 1 << 6  # after so many, tags are used again: ranks are never that far apart, see IN_FLIGHT
_DIGESTS = 1 << 12  # what is left of a tag for what is agreed on
_SIZES = _DIGESTS * _JOBS * _EXCHANGES  # tags of questions for sizes start here
_AGREEMENTS = 1 << 18  # after so many, their tags are used again


class Agreement:
    """What all ranks must be about to do, and whether they are."""

    def __init__(self, what: str) -> None:
        self.what, self.digest = what, digest(what)
        self.number = -1
        self.asked = False  # for the others' view of it
        self.reached = threading.Event()
        self.early: list[tuple[int, int]] | None = []  # stages and jobs that send before; None: it is reached


@dataclass(eq=False)
class Job:
    """One chunk on its way; `done` is called once, with the error if there was one."""

    agreement: Agreement  # the same for all chunks of a message
    steps: Steps
    done: Callable[[Job, BaseException | None], None]
    number: int = -1
    first_exchange: int = 0  # added to the numbers of exchanges, by jobs that run several routes
    bytes_sent: int = 0
    bytes_out: int = 0  # of these, to other hosts
    coding: float = 0.0  # seconds
    waiting: float = 0.0  # seconds in which a coding thread waited for data
    taken: list[torch.Tensor] = field(default_factory=list)  # buffers to hand back in the end
    carried: list[torch.Tensor] = field(default_factory=list)  # those of the carrier
    # On a GPU, what one stage made and a later one uses. If Python let go of it there, the first stage's stream could
    # have the memory again while kernels of the later one still read it: torch orders reuse by the stream that made it.
    crossing: list[object] | None = None
    ended: bool = False

    def tag(self, wanted: Exchange | AllReduce) -> int:
        what, job = self.agreement.digest % _DIGESTS, self.number % _JOBS
        return (what * _JOBS + job) * _EXCHANGES + self.first_exchange + wanted.number


class _Transfer:
    """Data under way to and from the members of a group."""

    def __init__(self, pending: Pending, parts: Parts, what: str, landing: Landing | None = None) -> None:
        self._pending, self._parts, self._what, self._landing = pending, parts, what, landing

    def wait(self, agreed: Callable[[], None]) -> Parts:
        """What came. Nobody looks at it before `agreed` returns."""
        with span("wire", self._what):
            if self._landing is not None:
                agreed()
            self._pending.wait(self._landing)
        agreed()
        return self._parts


class _Carried:
    """Data under way from GPU to GPU."""

    def __init__(self, carrier: Carrier, parcel: Parcel, job: Job, parts: Parts, places: Mapping[int, int]) -> None:
        """`places` says where in `parts` that of each rank belongs."""
        self._carrier, self._parcel, self._job, self._parts, self._places = carrier, parcel, job, parts, places

    def wait(self, agreed: Callable[[], None]) -> Parts:
        with span("wire", self._job.agreement.what):
            self._carrier.wait(self._parcel)
        agreed()
        self._job.carried += self._parcel.taken
        for rank, part in self._parcel.received.items():
            self._parts[self._places[rank]] = part
        return self._parts


class Pipeline:
    def __init__(
        self,
        gloo: Gloo,
        groups: Mapping[str, Members],
        buffers: Buffers,
        on_error: Callable[[BaseException], BaseException],
        disagree: Callable[[Agreement], PeerError],
        device: torch.device,
        probe: Probe | None = None,
    ) -> None:
        """`on_error` takes note of a failure and returns what is to be raised; `probe` sees all stages of all jobs."""
        self.carrier: Carrier | None = None  # takes what is to go from GPU to GPU
        self._gloo, self._groups, self._buffers = gloo, groups, buffers
        self._on_error, self._disagree, self._probe = on_error, disagree, probe
        self._device = device
        self.error: BaseException | None = None
        self._changed = threading.Condition()
        self._live: dict[Job, None] = {}
        self._count = 0
        self._agreements = 0
        self._unasked: deque[Agreement] = deque()  # in the order of their numbers
        self._agree: SimpleQueue[Agreement | None] = SimpleQueue()
        self._code: list[SimpleQueue[Any]] = [SimpleQueue() for _ in range(STAGES + 1)]
        self._free = [threading.Semaphore(IN_FLIGHT) for _ in range(STAGES)]
        self._threads: list[threading.Thread] = []
        self._stages = 0

    # -- for users ----------------------------------------------------------------------------------------------

    def submit(self, job: Job, elsewhere: bool = False) -> None:
        """Takes a job; all ranks submit the same ones in the same order.

        One that is done `elsewhere` is compared with the other ranks' and fails with the rest; `end` ends it.
        """
        with self._changed:
            error = self.error
            if error is None:
                job.number = self._count
                self._count += 1
                self._live[job] = None
                if not self._threads:
                    self._run(self._agreeing, "agree")
                    self._add_stage()
                if job.agreement.number < 0:
                    job.agreement.number = self._agreements
                    self._agreements += 1
                    self._unasked.append(job.agreement)
                if not elsewhere:
                    self._code[0].put((job, None))
        if error is not None:
            job.done(job, error)
        elif elsewhere:
            self._ask(job.agreement)

    def end(self, job: Job) -> None:
        """A job that was done elsewhere is through."""
        self._finish(job, None)

    def drain(self, patience: float | None = None) -> None:
        """Returns when all jobs submitted so far are done, or after that many seconds."""
        with self._changed:
            waiting = list(self._live)
            self._changed.wait_for(lambda: not any(job in self._live for job in waiting), patience)

    def fail(self, error: BaseException) -> None:
        """Ends all jobs with an error, also those that a thread is stuck in."""
        with self._changed:
            if self.error is None:
                self.error = error
            jobs = list(self._live)
        for job in jobs:
            job.agreement.reached.set()
            self._finish(job, self.error)
        self._release()

    def stop(self, patience: float = 2.0) -> bool:
        """Ends the threads after the jobs submitted so far; False if one is still busy after that many seconds."""
        with self._changed:
            if self._unasked:
                self._ask(self._unasked[-1])  # nobody would compare what is asked for later
        self._release()
        deadline = time.monotonic() + patience
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        ended = not any(thread.is_alive() for thread in self._threads)
        return ended if self.carrier is None else ended & self.carrier.close(patience)

    def exchange(self, job: Job, wanted: Exchange | AllReduce) -> Parts:
        """An exchange from inside a job, for codecs that call instead of yielding; it waits."""
        return self._received(job, self._begin(job, wanted, stage=0))

    def describe(self, number: int) -> str:
        """The words of a job that is under way, for traces; empty if there is none of that number."""
        with self._changed:
            return next((job.agreement.what.partition(" (")[0] for job in self._live if job.number == number), "")

    # -- threads ------------------------------------------------------------------------------------------------

    def _run(self, target: Callable[..., None], name: str, *args: int) -> None:
        label = "-".join(["gradzip", name, *map(str, args)])
        thread = threading.Thread(target=target, args=args, name=label, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _add_stage(self) -> None:
        """One more stage: threads are made when a job first needs them."""
        self._run(self._coding, "code", self._stages)
        self._stages += 1

    def _release(self) -> None:
        for queue in (*self._code, self._agree):
            queue.put(None)
        for free in self._free:
            free.release()

    def _ask(self, agreement: Agreement) -> None:
        """Has it compared with the others', after all that come before it: ranks compare in the same order."""
        if agreement.asked:
            return
        with self._changed:
            while not agreement.asked:
                first = self._unasked.popleft()
                first.asked = True
                self._agree.put(first)

    def _agreeing(self) -> None:
        """Compares with the others what each is about to do, message by message."""
        others = [rank for rank in range(self._gloo.world) if rank != self._gloo.rank]
        while (agreement := self._agree.get()) is not None:
            if self._probe:
                self._probe("agree", 0, agreement.number)
            own = torch.tensor([ROW_VERSION, agreement.digest])
            try:
                rows = self._gloo.send_row(own, others, others, agreement.number % _AGREEMENTS)
                rows.wait()
                if any(not torch.equal(row, own) for row in rows.received.values()):
                    raise self._disagree(agreement)
            except BaseException as error:
                self.fail(self.error or self._on_error(error))
                return
            with self._changed:
                early, agreement.early = agreement.early, None
            for stage, number in early or ():
                if self._probe:
                    self._probe("start", stage, number)
            agreement.reached.set()

    def _coding(self, stage: int) -> None:
        stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None  # type: ignore[no-untyped-call]
        with torch.no_grad(), torch.cuda.stream(stream):
            while (item := self._code[stage].get()) is not None:
                job, transfer = item
                try:
                    self._advance(stage, job, transfer)
                except StopIteration:
                    self._ask(job.agreement)
                    self._finish(job, None)
                except BaseException as error:
                    self._fail(job, error)
                del item, job, transfer  # they hold memory of the GPU, and the next job may come late

    def _advance(self, stage: int, job: Job, transfer: _Transfer | _Carried | None) -> None:
        """Codes until the next exchange and starts it. At the last stage all the rest of a job, exchanges and all."""
        began = time.perf_counter()
        try:
            received = None if transfer is None else self._received(job, transfer)
        finally:
            if stage > 0:
                self._free[stage - 1].release()
        wanted = self._resume(stage, job, received, began)
        while stage == STAGES:
            began = time.perf_counter()
            wanted = self._resume(stage, job, self._received(job, self._begin(job, wanted, stage)), began)
        self._free[stage].acquire()
        started = self._begin(job, wanted, stage)
        self._ask(job.agreement)
        with self._changed:
            if stage + 1 == self._stages:
                self._add_stage()
        self._code[stage + 1].put((job, started))

    def _resume(self, stage: int, job: Job, received: Parts | None, began: float) -> Exchange | AllReduce:
        arrived = time.perf_counter()
        job.waiting += arrived - began
        if self._probe:
            self._probe("code", stage, job.number)
        try:
            with span("code", job.agreement.what):
                return job.steps.send(received)  # type: ignore[arg-type]  # None starts a generator
        finally:
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()  # the next stage has a stream of its own
            if self._probe:
                self._probe("coded", stage, job.number)
            job.coding += time.perf_counter() - arrived

    # -- exchanges ----------------------------------------------------------------------------------------------

    def _begin(self, job: Job, wanted: Exchange | AllReduce, stage: int) -> _Transfer | _Carried:
        """Starts data on its way. What no tag tells apart has to wait until all ranks agree on what is done."""
        carried = self.carrier is not None and isinstance(wanted, Exchange) and wanted.carried
        self._check(job, agreed=isinstance(wanted, AllReduce) or wanted.most is None or carried)
        self._note_start(job, stage)
        if isinstance(wanted, AllReduce):
            assert stage == 0, "torch's sums are matched by their order: only one thread may issue them"
            sent = 2 * (self._gloo.world - 1) * wanted.tensor.numel() * wanted.tensor.itemsize // self._gloo.world
            job.bytes_sent += sent
            job.bytes_out += sent // (self._groups["intra"].size if "intra" in self._groups else 1)  # one passes it on
            if self.carrier is not None and self.carrier.sums(wanted.tensor):
                parcel = self.carrier.begin_sum(_SIZES + job.tag(wanted), wanted.tensor)
                return _Carried(self.carrier, parcel, job, [wanted.tensor], {})
            staged = self._on_host(job, wanted.tensor.view(torch.uint8)).view(wanted.tensor.dtype)
            return _Transfer(self._gloo.all_reduce(staged), [staged], job.agreement.what)
        group = self._groups[wanted.where]
        if self.carrier is not None and wanted.carried and group.size > 1:
            return self._carry(self.carrier, job, wanted, group)
        most = wanted.most if wanted.most is not None else self._ask_sizes(job, wanted, group)
        parts: Parts = [None] * group.size
        parts[group.rank] = wanted.send[group.rank]
        into, sends = [], []
        for step in range(1, group.size):  # every member starts with another one
            i, j = (group.rank - step) % group.size, (group.rank + step) % group.size
            size, part = most[i], wanted.send[j]
            if size is not None:
                buffer = self._buffers.take(size)
                job.taken.append(buffer)
                parts[i] = buffer[:size]
                if size:
                    into.append((group.ranks[i], buffer[:size]))
            if part is not None and part.numel():
                sends.append((group.ranks[j], self._on_host(job, part)))
                self._count_bytes(job, part.numel(), [group.ranks[j]])
        under_way = self._gloo.send(sends, into, job.tag(wanted))
        return _Transfer(under_way, parts, job.agreement.what, wanted.landing)

    def _note_start(self, job: Job, stage: int) -> None:
        """Data counts as under way from when all ranks agree: until then it waits for ranks, not for the network."""
        with self._changed:
            early = job.agreement.early
            if early is not None:
                early.append((stage, job.number))
        if early is None and self._probe:
            self._probe("start", stage, job.number)

    def _received(self, job: Job, transfer: _Transfer | _Carried) -> Parts:
        """What came from the others, who do the same as this rank."""
        self._ask(job.agreement)  # data of ranks that do something else never comes
        return transfer.wait(lambda: self._check(job, agreed=True))

    def _check(self, job: Job, agreed: bool) -> None:
        """Raises if the channel has failed; `agreed`: waits until all ranks agree on the job."""
        if agreed:
            self._ask(job.agreement)
            job.agreement.reached.wait()
        if self.error is not None:
            raise self.error

    def _carry(self, carrier: Carrier, job: Job, wanted: Exchange, group: Members) -> _Carried:
        assert wanted.most is not None
        parts: Parts = [None] * group.size
        parts[group.rank] = wanted.send[group.rank]
        others = [i for i in range(group.size) if i != group.rank]
        most = {group.ranks[i]: size for i in others if (size := wanted.most[i]) is not None}
        out = {group.ranks[i]: part for i in others if (part := wanted.send[i]) is not None}
        parcel = carrier.begin(_SIZES + job.tag(wanted), out, most)
        for rank, part in out.items():
            self._count_bytes(job, part.numel() + 8 * self._gloo.world, [rank])
        return _Carried(carrier, parcel, job, parts, {rank: i for i, rank in enumerate(group.ranks)})

    def _ask_sizes(self, job: Job, wanted: Exchange, group: Members) -> list[int | None]:
        """What each member is going to send here, where it does not follow from what was agreed."""
        sizes = [-1] * self._gloo.world
        sizes[: group.size] = [-1 if part is None else part.numel() for part in wanted.send]
        others = [rank for rank in group.ranks if rank != self._gloo.rank]
        rows = self._gloo.send_row(torch.tensor(sizes), others, others, _SIZES + job.tag(wanted))
        rows.wait()
        said = {rank: int(row[group.rank]) for rank, row in rows.received.items()}
        self._count_bytes(job, 8 * len(sizes), others)
        return [None if (size := said.get(rank, -1)) < 0 else size for rank in group.ranks]

    def _count_bytes(self, job: Job, size: int, to: Sequence[int]) -> None:
        neighbours = self._groups["intra"].ranks if "intra" in self._groups else ()
        job.bytes_sent += size * len(to)
        job.bytes_out += size * sum(rank not in neighbours for rank in to)

    def _on_host(self, job: Job, part: torch.Tensor) -> torch.Tensor:
        if part.device.type == "cpu":
            return part
        buffer = self._buffers.take(part.numel())
        job.taken.append(buffer)
        staged = buffer[: part.numel()]
        staged.copy_(part)
        return staged

    # -- the end of a job ---------------------------------------------------------------------------------------

    def _fail(self, job: Job, error: BaseException) -> None:
        raised = self.error or self._on_error(error)
        self.fail(raised)
        self._finish(job, raised)

    def _finish(self, job: Job, error: BaseException | None) -> None:
        with self._changed:
            if job.ended:
                return
            job.ended = True
        if error is None:
            self._buffers.give(job.taken)
            if self.carrier is not None:
                self.carrier.buffers.give(job.carried)
            job.crossing = None
        try:
            job.done(job, error)
        except BaseException as failure:
            if error is None:
                self._fail(job, failure)
        finally:
            with self._changed:
                self._live.pop(job, None)
                self._changed.notify_all()


def digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
