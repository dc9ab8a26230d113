"""Chunks go through a pipeline: while one is coded, others are on the wire.

A job is a generator that yields what it wants exchanged (see executor.py). Stage i codes until the i-th exchange, then
sends a row that says what it is about to do; its partner waits for the rows of the others, compares, and starts the
data on its way; stage i+1 waits for the data and goes on. Each is a thread that takes jobs strictly in the order in
which they were submitted, so what is issued, and in which order, never depends on timing:

    code 0 -> start 0 -> code 1 -> start 1 -> ... -> code n

A row holds: a digest of what the rank does, whether its values are finite, and the size of what each member will get.
Messages are matched by job and exchange. So a rank that does something else than the others is found out by its row
before any data moves, and everybody raises.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import torch

from ..errors import PeerError
from .buffers import Buffers
from .executor import AllReduce, Exchange, Members, Received, Steps
from .gloo import Gloo, Pending, Rows

ROW_VERSION = 1
STAGES = 6  # exchanges that overlap; a job that needs more does the rest of them in the last stage
IN_FLIGHT = 3  # chunks whose data may be under way in a stage: the wire never idles, and the first is not held up
_MOST_EXCHANGES = 256  # of one job; part of the tag
_JOBS = 1 << 20  # after so many, tags are used again


@dataclass(eq=False)
class Job:
    """One chunk on its way; `done` is called once, with the error if there was one."""

    what: str  # what all ranks must agree on
    steps: Steps
    done: Callable[[Job, BaseException | None], None]
    number: int = -1
    exchanges: int = 0
    bytes_sent: int = 0
    coding: float = 0.0  # seconds
    waiting: float = 0.0  # seconds in which a coding thread waited for data
    taken: list[torch.Tensor] = field(default_factory=list)  # buffers to hand back in the end
    ended: bool = False

    @property
    def tag(self) -> int:
        return self.number % _JOBS * _MOST_EXCHANGES + self.exchanges


class _Transfer:
    """Data under way to and from the members of a group."""

    def __init__(self, pending: Pending, parts: list[torch.Tensor | None], finite: bool) -> None:
        self._pending, self._parts, self._finite = pending, parts, finite

    def wait(self) -> Received:
        self._pending.wait()
        return Received(self._parts, self._finite)


Probe = Callable[[str, int, Job], None]


class Pipeline:
    def __init__(
        self,
        gloo: Gloo,
        groups: Mapping[str, Members],
        buffers: Buffers,
        on_error: Callable[[BaseException], BaseException],
        disagree: Callable[[Job, list[int]], PeerError],
        device: torch.device,
        probe: Probe | None = None,
    ) -> None:
        """`on_error` takes note of a failure and returns what is to be raised; `probe` sees all stages of all jobs."""
        self._gloo, self._groups, self._buffers = gloo, groups, buffers
        self._on_error, self._disagree, self._probe = on_error, disagree, probe
        self._device = device
        self.error: BaseException | None = None
        self._changed = threading.Condition()
        self._live: dict[Job, None] = {}
        self._count = 0
        self._code: list[SimpleQueue[Any]] = [SimpleQueue() for _ in range(STAGES + 1)]
        self._start: list[SimpleQueue[Any]] = [SimpleQueue() for _ in range(STAGES)]
        self._free = [threading.Semaphore(IN_FLIGHT) for _ in range(STAGES)]
        self._threads: list[threading.Thread] = []
        self._busy_stages = 0

    # -- for users ----------------------------------------------------------------------------------------------

    def submit(self, job: Job) -> None:
        """Takes a job; all ranks submit the same ones in the same order."""
        with self._changed:
            error = self.error
            if error is None:
                job.number = self._count
                self._count += 1
                self._live[job] = None
                if not self._threads:
                    self._grow()
                self._code[0].put((job, None))
        if error is not None:
            job.done(job, error)

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
            self._finish(job, self.error)
        self._release()

    def stop(self, patience: float = 2.0) -> bool:
        """Ends the threads after the jobs submitted so far; False if one is still busy after that many seconds."""
        self._release()
        deadline = time.monotonic() + patience
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def exchange(self, job: Job, wanted: Exchange | AllReduce) -> Received:
        """An exchange from inside a job, for codecs that call instead of yielding; it waits."""
        return self._begin(job, wanted, self._announce(job, wanted)).wait()

    # -- threads ------------------------------------------------------------------------------------------------

    def _grow(self) -> None:
        """One more stage: threads are made when a job first needs them."""
        stage = self._busy_stages
        for name, target in (("code", self._coding), ("start", self._starting)):
            if name == "start" and stage == STAGES:
                continue
            thread = threading.Thread(target=target, args=(stage,), name=f"gradzip-{name}-{stage}", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._busy_stages += 1

    def _release(self) -> None:
        for queue in (*self._code, *self._start):
            queue.put(None)

    def _coding(self, stage: int) -> None:
        stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None  # type: ignore[no-untyped-call]
        with torch.no_grad(), torch.cuda.stream(stream):
            while (item := self._code[stage].get()) is not None:
                job, transfer = item
                try:
                    self._advance(stage, job, transfer)
                except StopIteration:
                    self._finish(job, None)
                except BaseException as error:
                    self._fail(job, error)

    def _advance(self, stage: int, job: Job, transfer: _Transfer | None) -> None:
        """Codes until the next exchange. At the last stage all the rest of a job, exchanges and all."""
        began = time.perf_counter()
        try:
            received = None if transfer is None else transfer.wait()
        finally:
            if stage > 0:
                self._free[stage - 1].release()
        wanted = self._resume(stage, job, received, began)
        while stage == STAGES:
            began = time.perf_counter()
            wanted = self._resume(stage, job, self.exchange(job, wanted), began)
        rows = self._announce(job, wanted)
        self._start[stage].put((job, wanted, rows))

    def _resume(self, stage: int, job: Job, received: Received | None, began: float) -> Exchange | AllReduce:
        arrived = time.perf_counter()
        job.waiting += arrived - began
        if self._probe:
            self._probe("code", stage, job)
        try:
            return job.steps.send(received)  # type: ignore[arg-type]  # None starts a generator
        finally:
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()  # the next stage has a stream of its own
            job.coding += time.perf_counter() - arrived

    def _starting(self, stage: int) -> None:
        while (item := self._start[stage].get()) is not None:
            job, wanted, rows = item
            self._free[stage].acquire()
            try:
                transfer = self._begin(job, wanted, rows, stage)
            except BaseException as error:
                self._free[stage].release()
                self._fail(job, error)
                continue
            with self._changed:
                if stage + 1 == self._busy_stages:
                    self._grow()
            self._code[stage + 1].put((job, transfer))

    # -- exchanges ----------------------------------------------------------------------------------------------

    def _announce(self, job: Job, wanted: Exchange | AllReduce) -> Rows:
        """Starts to tell the members of the group what this rank is about to do."""
        if self.error is not None:
            raise self.error
        group = self._groups["flat" if isinstance(wanted, AllReduce) else wanted.where]
        sizes = [-1] * self._gloo.world
        if isinstance(wanted, AllReduce):
            sizes[: group.size] = [wanted.tensor.numel() * wanted.tensor.itemsize] * group.size
            where, others = "sum", [r for r in group.ranks if r != self._gloo.rank]
            to = of = others
        else:
            sizes[: group.size] = [-1 if part is None else part.numel() for part in wanted.send]
            where = wanted.where
            to, of = _partners(group, wanted.neighbours)
        job.bytes_sent += 8 * len(sizes) * len(to)
        row = torch.tensor([digest(f"{job.what} ({where})"), int(wanted.finite), *sizes])
        return self._gloo.send_row(row, to, of, job.tag)

    def _begin(self, job: Job, wanted: Exchange | AllReduce, rows: Rows, stage: int = 0) -> _Transfer:
        """Compares the rows of the members, and starts the data on its way."""
        if self._probe:
            self._probe("start", stage, job)
        rows.wait()
        own = digest(f"{job.what} ({'sum' if isinstance(wanted, AllReduce) else wanted.where})")
        said = {rank: row.tolist() for rank, row in rows.received.items()}
        if any(row[0] != own for row in said.values()):
            raise self._disagree(job, sorted([*said, self._gloo.rank]))
        finite = wanted.finite and all(row[1] for row in said.values())
        tag, job.exchanges = job.tag, job.exchanges + 1
        if isinstance(wanted, AllReduce):
            assert stage == 0, "torch's sums are matched by their order: only one thread may issue them"
            job.bytes_sent += (
                2 * (self._gloo.world - 1) * wanted.tensor.numel() * wanted.tensor.itemsize // (self._gloo.world)
            )
            pending = self._gloo.all_reduce(wanted.tensor) if self._gloo.world > 1 else Pending()
            return _Transfer(pending, [wanted.tensor], finite)
        group = self._groups[wanted.where]
        parts: list[torch.Tensor | None] = [None] * group.size
        parts[group.rank] = wanted.send[group.rank]
        into = []
        for i, rank in enumerate(group.ranks):
            size = said[rank][2 + group.rank] if rank in said else -1
            if size >= 0:
                buffer = self._buffers.take(size)
                job.taken.append(buffer)
                parts[i] = buffer[:size]
                if size:
                    into.append((rank, buffer[:size]))
        sends = []
        for step in range(1, group.size):  # every member starts with another one
            i = (group.rank + step) % group.size
            part = wanted.send[i]
            if part is not None and part.numel():
                sends.append((group.ranks[i], self._on_host(job, part)))
                job.bytes_sent += part.numel()
        return _Transfer(self._gloo.send(sends, into, tag), parts, finite)

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
        try:
            job.done(job, error)
        except BaseException as failure:
            if error is None:
                self._fail(job, failure)
        finally:
            with self._changed:
                self._live.pop(job, None)
                self._changed.notify_all()


def _partners(group: Members, neighbours: bool) -> tuple[list[int], list[int]]:
    """To whom a rank sends, and from whom it receives."""
    if not neighbours:
        others = [rank for i, rank in enumerate(group.ranks) if i != group.rank]
        return others, others
    after, before = group.ranks[(group.rank + 1) % group.size], group.ranks[group.rank - 1]
    return ([after], [before]) if group.size > 1 else ([], [])


def digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
