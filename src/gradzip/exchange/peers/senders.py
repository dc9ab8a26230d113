"""Threads that hand data to sockets.

Gloo's send writes what the connection takes before it returns, on the thread that calls it: for megabytes that are
milliseconds, in which the thread would otherwise code. Where a GPU does the coding, and the host has cores to spare,
larger messages go by a few threads that do nothing else, unless queues are short (sockets.py): then a connection takes
little, and Gloo's own thread hands over the rest. Tags match messages: it does not matter which goes first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

import torch.distributed as dist


class Later:
    """A message that may not have been started yet; it can be waited for like one that was."""

    def __init__(self, start: Callable[[], dist.Work]) -> None:
        self._start, self._over = start, threading.Event()
        self._work: dist.Work | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._work = self._start()
        except BaseException as error:
            self._error = error
        self._over.set()

    def wait(self) -> None:
        self._over.wait()
        if self._error is not None:
            raise self._error
        assert self._work is not None
        self._work.wait()


class Senders:
    """A few threads, made when there is something to send."""

    def __init__(self, count: int) -> None:
        self.count, self._threads = count, list[threading.Thread]()
        self._queue: SimpleQueue[Later | None] = SimpleQueue()
        self._lock = threading.Lock()

    def send(self, start: Callable[[], dist.Work]) -> Later:
        later = Later(start)
        self._queue.put(later)
        with self._lock:
            if len(self._threads) < self.count:
                name = f"gradzip-send-{len(self._threads)}"
                self._threads.append(threading.Thread(target=self._sending, name=name, daemon=True))
                self._threads[-1].start()
        return later

    def stop(self, patience: float = 2.0) -> None:
        """Ends the threads once nothing waits any more."""
        with self._lock:
            threads, self._threads = self._threads, []
        for _ in threads:
            self._queue.put(None)
        for thread in threads:
            thread.join(patience)

    def _sending(self) -> None:
        while (later := self._queue.get()) is not None:
            later.run()
