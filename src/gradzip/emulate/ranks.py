"""The processes of a run: how they start, what they print, who fails first, and how all of them end."""

from __future__ import annotations

import ctypes
import os
import re
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import IO

from ..errors import EmulationError
from .report import Report

_LONGEST_LINE = 1 << 16
# A progress bar's carriage return ends a line as well; the last byte waits, for it may be half of \r\n.
_LINE_END = re.compile(rb"\r?\n|\r(?=[^\n])")
_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
_CHILD_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER: what loses its parent becomes a child of this process
_libc = ctypes.CDLL(None, use_errno=True)


class Abandoned(Exception):
    """Whoever started this run is gone."""


class Ranks:
    def __init__(self, report: Report, grace: float) -> None:
        self._report = report
        self._grace = grace
        self._selector = selectors.DefaultSelector()
        self._running: dict[int, tuple[int, subprocess.Popen[bytes]]] = {}  # pid: rank and process
        self._streams: list[_Stream] = []
        self._ending = False  # from the first failure or the request to stop
        self._next: tuple[float, signal.Signals] | None = None  # when the rest gets which signal
        _libc.prctl(_CHILD_SUBREAPER, 1)

    def start(self, rank: int, command: Sequence[str], environment: Mapping[str, str]) -> None:
        try:
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # a group that can be ended as a whole, out of reach of the terminal's Ctrl-C
                preexec_fn=partial(_die_with_parent, os.getpid()),
            )
        except OSError as reason:
            raise EmulationError(f"cannot run {command[0]!r}: {reason.strerror}") from reason
        self._running[process.pid] = (rank, process)
        for name, pipe in (("out", process.stdout), ("err", process.stderr)):
            assert pipe is not None
            stream = _Stream(rank, name, pipe, self._report)
            self._streams.append(stream)
            self._selector.register(pipe, selectors.EVENT_READ, partial(self._read, stream))

    def watch(self, control: int) -> None:
        """Returns when all ranks have ended: by themselves, after a failure, or because `control` said so."""
        self._selector.register(control, selectors.EVENT_READ, lambda: self._obey(os.read(control, 64)))
        woken = _wake_up_on_child()
        self._selector.register(woken, selectors.EVENT_READ, lambda: os.read(woken, 64))
        while self._running:
            wait = None if self._next is None else max(0.0, self._next[0] - time.monotonic())
            for key, _ in self._selector.select(wait):
                key.data()
            self._reap()
            if self._next is not None and time.monotonic() >= self._next[0]:
                self._end(self._next[1])
        for stream in self._streams:
            stream.finish()

    def kill(self) -> None:
        """Ends whatever still runs, at once, and waits for it."""
        self._signal(signal.SIGKILL)
        for pid, (_, process) in self._running.items():
            process.wait()
            _wait_for_group(pid)

    def _read(self, stream: _Stream) -> None:
        if not stream.read():
            self._selector.unregister(stream.pipe)

    def _obey(self, word: bytes) -> None:
        if not word:
            raise Abandoned
        self._end(signal.SIGTERM)

    def _end(self, number: signal.Signals) -> None:
        self._ending = True
        self._signal(number)
        self._next = (time.monotonic() + self._grace, signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._running:
            with suppress(ProcessLookupError):
                os.killpg(pid, number)

    def _reap(self) -> None:
        """Takes note of ended ranks, and of orphans, which this process inherits."""
        while True:
            try:
                # Not reaped yet: until it is, its number cannot become that of another process group.
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            pid = ended.si_pid
            if pid in self._running:
                rank, process = self._running.pop(pid)
                with suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)  # what it started and left behind
                process.returncode = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                _wait_for_group(pid)
                self._note(rank, process.returncode)
            else:
                os.waitpid(pid, 0)

    def _note(self, rank: int, code: int) -> None:
        for stream in self._streams:
            if stream.rank == rank:
                stream.read()  # its last words, before the news of its end
        first_failure = code != 0 and not self._ending
        self._report("exit", rank=rank, code=code, first_failure=first_failure)
        if first_failure:
            self._ending = True
            self._next = (time.monotonic() + self._grace, signal.SIGTERM)


class _Stream:
    """One of a rank's two outputs, cut into lines."""

    def __init__(self, rank: int, name: str, pipe: IO[bytes], report: Report) -> None:
        self.rank, self.pipe = rank, pipe
        self._line: Callable[[str], None] = lambda text: report("line", rank=rank, stream=name, text=text)
        self._rest = b""
        os.set_blocking(pipe.fileno(), False)

    def read(self) -> bool:
        """Passes on the lines that are complete; False at the end of the stream."""
        while True:
            try:
                data = os.read(self.pipe.fileno(), _LONGEST_LINE)
            except BlockingIOError:
                return True
            *lines, self._rest = _LINE_END.split(self._rest + data)
            if len(self._rest) >= _LONGEST_LINE or (not data and self._rest):
                lines, self._rest = [*lines, self._rest.removesuffix(b"\r")], b""
            for line in lines:
                self._line(line.decode(errors="replace"))
            if not data:
                return False

    def finish(self) -> None:
        """The rest, also of a line without an end."""
        self.read()
        if self._rest:
            self._line(self._rest.removesuffix(b"\r").decode(errors="replace"))
        self.pipe.close()


def _die_with_parent(parent: int) -> None:
    _libc.prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # it died before it was asked for
        os._exit(1)


def _wait_for_group(pid: int) -> None:
    """A process that is killed needs a moment to end: the rest of a group whose first process has ended."""
    with suppress(ChildProcessError):
        while True:
            os.waitpid(-pid, 0)


def _wake_up_on_child() -> int:
    """A file that becomes readable whenever a child ends."""
    readable, writable = os.pipe()
    os.set_blocking(readable, False)
    os.set_blocking(writable, False)
    signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return readable
