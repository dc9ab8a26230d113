"""What happens on GPUs when another rank is gone: a rank that waits for NCCL cannot raise an exception by itself.

The heartbeat notices that a rank is gone (heartbeat.py). It logs who it was and aborts the process group, so
that kernels which wait for that rank end. Streams then go on over data that never came: the next call of gradzip raises
PeerError, and no state is saved. A process that does not call gradzip within 30 seconds, as it is stuck or busy
elsewhere, ends with EXIT_CODE.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable

import torch
import torch.distributed as dist

EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: start again from a checkpoint
PATIENCE = 30.0  # seconds

_logger = logging.getLogger("gradzip")


class Abort:
    """Aborts a process group, once, and ends the process unless somebody hears of the error in time."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, patience: float = PATIENCE) -> None:
        self._group, self._device, self._patience = group, device, patience
        self._heard = threading.Event()
        self._begun = threading.Lock()

    def hear(self) -> None:
        """The user's code is told of the error now, and may do what it likes about it."""
        self._heard.set()

    def __call__(self, error: BaseException) -> None:
        if not self._begun.acquire(blocking=False):
            return
        if not self._heard.is_set():
            _logger.error(
                "%s. The NCCL process group is aborted; the next backward raises PeerError. If there is none within "
                "%.0f s, this process ends with exit code %d",
                error,
                self._patience,
                EXIT_CODE,
            )
        for name, run in (("abort", self._abort), ("last-resort", self._end_process)):
            _start(name, run)

    def _abort(self) -> None:
        try:
            self._group._get_backend(self._device).abort()
        except Exception as reason:
            _logger.error("NCCL's process group could not be aborted: %s", reason)

    def _end_process(self) -> None:
        if self._heard.wait(self._patience):
            return
        _logger.critical("This process ends with exit code %d: it did not call gradzip again", EXIT_CODE)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        # Not sys.exit: the main thread may wait in a library that never returns, and this is not the main thread.
        os._exit(EXIT_CODE)


def _start(name: str, run: Callable[[], None]) -> None:
    threading.Thread(target=run, name=f"gradzip-{name}", daemon=True).start()
