"""One thread per process does all that must not hold up backward: coding, sending, waiting for peers.

Jobs run one after the other in the order of `submit`. That order is the same on all ranks, because it follows from
the order of buckets; collectives are matched by it, so nothing here may depend on timing.

A thread that is inside torch when Python shuts down takes the process down with it ("terminate called without an
active exception") and hides the error that ended the script. So the worker is stopped before, and a thread that waits
for something in vain looks at `pause`.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

import torch

Job = Callable[[], None]


class Worker:
    """A thread that runs jobs in order. Jobs handle their own errors."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="gradzip-worker", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        self._jobs.put(job)

    def drain(self, patience: float | None = None) -> None:
        """Returns when all jobs submitted so far are done, or after that many seconds."""
        done = threading.Event()
        self.submit(done.set)
        done.wait(patience)

    def stop(self, patience: float) -> None:
        """Ends the thread after the jobs submitted so far, or gives it up after that many seconds."""
        self._jobs.put(None)
        self._thread.join(patience)

    def _run(self) -> None:
        with torch.no_grad():
            while (job := self._jobs.get()) is not None:
                job()


_lock = threading.Lock()
_worker: Worker | None = None


def shared() -> Worker:
    """The worker of this process; all handles use it."""
    global _worker
    with _lock:
        if _worker is None:
            _worker = Worker()
        return _worker


_closing = threading.Event()


def pause(seconds: float) -> None:
    """time.sleep for threads of this package: it never returns once Python shuts down."""
    time.sleep(seconds)
    if _closing.is_set():
        threading.Event().wait()


@atexit.register
def _close() -> None:
    if _worker is not None:
        _worker.stop(patience=0.5)
    _closing.set()
    time.sleep(0.01)  # for those that are about to look
