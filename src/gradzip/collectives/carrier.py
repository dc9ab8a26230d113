"""Large exchanges from GPU to GPU, in one order on all ranks.

A communicator (nccl.py) needs three things that a pipeline of threads does not give by itself. Sizes must match to the
byte: every rank tells each peer how much is coming, in a row over Gloo. Exchanges must be issued in the same order on
all ranks. And none should begin before its peers are there, because it holds the GPU's stream until they come. So all
ranks tell rank 0 what they are ready for, and rank 0 announces what all of them are ready for: nobody ever waits for an
exchange that another one has to come before.

So a peer that is gone is noticed by Gloo, whose waits end with an error, or by the communicator's own state; either way
`abort` ends everything that is under way.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Protocol

import torch

from ..errors import PeerError
from ..exchange.peers.buffers import Buffers
from ..exchange.peers.gloo import Broken, Gloo, Pending, Rows

LEAST = 4 << 20  # bytes of gradient in a chunk from which on it is carried: smaller ones are sooner there over Gloo
READY = (1 << 20) - 1  # the tag of what ranks say to rank 0, among those of rows
ORDERS = 1 << 20  # tags of announcements start here
_ANNOUNCED = 1 << 18  # after so many, tags are used again
_NAP = 5e-5  # seconds between looks at an exchange that is under way
_LOOKS = 40  # after so many, the communicator is asked how it is


class Communicator(Protocol):
    """What carries bytes; nccl.py has the real one. What is started returns a function that says when it is done."""

    device: torch.device

    def exchange(self, into: Mapping[int, torch.Tensor], out: Mapping[int, torch.Tensor]) -> Callable[[], bool]: ...
    def sum(self, tensor: torch.Tensor) -> Callable[[], bool]: ...
    def sums(self, dtype: torch.dtype) -> bool: ...
    def check(self) -> None: ...
    def abort(self) -> None: ...
    def close(self) -> None: ...


class Parcel:
    """An exchange that waits for its turn, or is under way. Its tensors are kept until it is done."""

    def __init__(self, tag: int, out: Mapping[int, torch.Tensor], most: Mapping[int, int]) -> None:
        self.tag, self.out, self.most = tag, out, most
        self.total: torch.Tensor | None = None  # to be summed, where nothing goes from rank to rank
        self.rows, self.said = Rows(), Rows()
        self.received: dict[int, torch.Tensor] = {}
        self.taken: list[torch.Tensor] = []
        self.issued = threading.Event()
        self.landed: Callable[[], bool] | None = None


class Carrier:
    def __init__(
        self,
        gloo: Gloo,
        communicator: Communicator,
        timeout: timedelta,
        failed: Callable[[BaseException], None],
        least: int = LEAST,
    ) -> None:
        """`failed` hears of an error that no job has met; an exchange may take as long as `timeout`."""
        self.device, self.least = communicator.device, least
        self._timeout = timeout.total_seconds()
        self.buffers = Buffers(device=communicator.device)
        self._gloo, self._communicator, self._failed = gloo, communicator, failed
        self._others = [rank for rank in range(gloo.world) if rank != gloo.rank]
        self._changed = threading.Condition()
        self._ready: dict[int, Parcel] = {}  # by tag, in the order in which they became ready here
        self._ended = False
        self._under_way = 0
        self._announced: deque[Pending] = deque()
        self._heard: Counter[int] = Counter()  # on rank 0: how many others are ready for an exchange, by its tag
        self._threads: list[threading.Thread] = []

    # -- for the pipeline -----------------------------------------------------------------------------------------

    def sums(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor can be summed up here."""
        large = tensor.numel() * tensor.itemsize >= self.least
        return large and tensor.device.type == self.device.type and self._communicator.sums(tensor.dtype)

    def begin(self, tag: int, out: Mapping[int, torch.Tensor], most: Mapping[int, int]) -> Parcel:
        """Takes bytes for some ranks; `most` has those that send something here, and how much that is at the most."""
        parcel = Parcel(tag, {rank: part.to(self.device) for rank, part in out.items()}, most)
        self._settle()
        sizes = torch.zeros(self._gloo.world, dtype=torch.int64)
        for rank, part in parcel.out.items():
            sizes[rank] = part.numel()
        parcel.rows = self._gloo.send_row(sizes, list(out), list(most), tag)
        self._enqueue(parcel)
        return parcel

    def begin_sum(self, tag: int, tensor: torch.Tensor) -> Parcel:
        parcel = Parcel(tag, {}, {})
        parcel.total = tensor
        self._settle()
        self._enqueue(parcel)
        return parcel

    def wait(self, parcel: Parcel) -> None:
        """Returns when the data is there; Broken if it will never be. Every parcel is waited for once."""
        try:
            self._wait(parcel)
        finally:
            with self._changed:
                self._under_way -= 1

    @property
    def idle(self) -> bool:
        """Whether nothing is under way to this rank; others may still receive what it sent."""
        return self._under_way == 0

    def _wait(self, parcel: Parcel) -> None:
        parcel.issued.wait()
        looks, deadline = 0, time.monotonic() + self._timeout
        while parcel.landed is not None and not self._ended:
            if parcel.landed():
                return
            looks += 1
            if looks % _LOOKS == 0:
                self._communicator.check()
                if time.monotonic() > deadline:
                    raise Broken(None, RuntimeError(f"timed out after {self._timeout:.0f} s"))
            time.sleep(_NAP)
        raise Broken(None, RuntimeError("the communicator is closed"))

    # -- the end ------------------------------------------------------------------------------------------------

    def abort(self) -> None:
        self._end()
        self._communicator.abort()

    def close(self, patience: float) -> bool:
        """Leaves; False if something was still under way after that many seconds."""
        self._end()
        deadline = time.monotonic() + patience
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        self._communicator.close()
        return not any(thread.is_alive() for thread in self._threads)

    def _end(self) -> None:
        with self._changed:
            self._ended = True
            left = list(self._ready.values())
            self._changed.notify_all()
        for parcel in left:
            parcel.issued.set()

    # -- one order ------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """What is to be sent is there: it will be read on another stream than the one that made it."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def _enqueue(self, parcel: Parcel) -> None:
        if self._gloo.rank != 0:
            parcel.said = self._gloo.send_row(torch.tensor([parcel.tag]), [0], [], READY)
        with self._changed:
            if self._ended:
                raise Broken(None, RuntimeError("the communicator is closed"))
            self._ready[parcel.tag] = parcel
            self._under_way += 1
            self._changed.notify_all()
            if not self._threads:
                self._run(self._issuing, "gradzip-carry")
                if self._gloo.rank == 0:
                    self._run(self._listening, "gradzip-ready")

    def _run(self, target: Callable[[], None], name: str) -> None:
        self._threads.append(threading.Thread(target=self._ending_all, args=(target,), name=name, daemon=True))
        self._threads[-1].start()

    def _ending_all(self, target: Callable[[], None]) -> None:
        try:
            with torch.no_grad():
                target()
        except BaseException as error:
            if not self._ended:
                self._failed(error)

    def _issuing(self) -> None:
        for number in itertools.count():
            with self._changed:  # nobody listens to rank 0 who has nothing to send: that would never end
                self._changed.wait_for(lambda: self._ready or self._ended)
                if self._ended:
                    return
            self._issue(self._next(ORDERS + number % _ANNOUNCED))

    def _listening(self) -> None:
        """On rank 0: hears what others are ready for, as long as something that is ready here waits for them.

        A thread of its own: what rank 0 itself is the last to be ready for must not wait until somebody speaks again.
        """
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._ended or any(self._heard[tag] < len(self._others) for tag in self._ready)
                )
                if self._ended:
                    return
            tag = self._gloo.receive_from_any(READY)
            with self._changed:
                self._heard[tag] += 1
                self._changed.notify_all()

    def _next(self, tag: int) -> Parcel:
        """The exchange whose turn it is."""
        if self._gloo.rank == 0:
            chosen = self._ready_everywhere()
            self._announced.append(self._gloo.send_row(torch.tensor([chosen]), self._others, [], tag))
            while len(self._announced) > 64:
                self._announced.popleft().wait()
        else:
            rows = self._gloo.send_row(torch.tensor([0]), [], [0], tag)
            rows.wait()
            chosen = int(rows.received[0])
        with self._changed:
            self._changed.wait_for(lambda: chosen in self._ready or self._ended)
            if self._ended:
                raise Broken(None, RuntimeError("the communicator is closed"))
            return self._ready[chosen]

    def _ready_everywhere(self) -> int:
        """On rank 0: an exchange that all ranks are ready for, the oldest of them."""

        def oldest() -> int | None:
            return next((tag for tag in self._ready if self._heard[tag] == len(self._others)), None)

        with self._changed:
            self._changed.wait_for(lambda: self._ended or oldest() is not None)
            found = oldest()
        if found is None:
            raise Broken(None, RuntimeError("the communicator is closed"))
        return found

    def _issue(self, parcel: Parcel) -> None:
        parcel.said.wait()
        parcel.rows.wait()
        if parcel.total is not None:
            parcel.landed = self._communicator.sum(parcel.total)
        else:
            self._exchange(parcel)
        with self._changed:
            del self._ready[parcel.tag], self._heard[parcel.tag]
        parcel.issued.set()

    def _exchange(self, parcel: Parcel) -> None:
        for rank, row in parcel.rows.received.items():
            size = int(row[self._gloo.rank])
            if not 0 <= size <= parcel.most[rank]:
                raise PeerError(f"rank {rank} wants to send {size} bytes where {parcel.most[rank]} are the most")
            buffer = self.buffers.take(size)
            parcel.taken.append(buffer)
            parcel.received[rank] = buffer[:size]
        into = _filled(parcel.received)
        out = _filled(parcel.out)
        parcel.landed = self._communicator.exchange(into, out) if into or out else lambda: True


def _filled(parts: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    return {rank: part for rank, part in parts.items() if part.numel()}
