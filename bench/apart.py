"""One row of a benchmark in processes of its own, so that what hangs or crashes becomes a row that says so.

Every rank starts a process beside itself; together they form a process group of their own. They say a line now and
then; one that is silent for too long is ended, and the ranks agree on what became of all.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from typing import TextIO

import torch.distributed as dist

ROW = "row "  # a line that begins with this is the result
SHORT = 160  # characters of what a process said last


@dataclass(frozen=True)
class End:
    """How the process of a rank ended, and when."""

    seconds: float
    outcome: str  # empty: well
    row: str  # what it said behind ROW


def run(arguments: list[str], silence_s: float, group: dist.ProcessGroup) -> tuple[str, str]:
    """The row that rank 0's process gave, and what became of it: empty if all went well. Call it on all ranks."""
    ends: list[End | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(ends, _run(arguments, silence_s, _port(group)), group=group)
    known = [end for end in ends if end is not None]
    bad = sorted((end for end in known if end.outcome), key=lambda end: (end.outcome.startswith("hangs"), end.seconds))
    return known[0].row, bad[0].outcome if bad else ""  # who crashed first tells more than who was left waiting


def _port(group: dist.ProcessGroup) -> str:
    """A free one on the host of rank 0, which is the master's."""
    with socket.socket() as free:
        free.bind(("", 0))
        told = [str(free.getsockname()[1])]
    dist.broadcast_object_list(told, group_src=0, group=group)
    return told[0]


def _run(arguments: list[str], silence_s: float, port: str) -> End:
    environment = {**os.environ, "MASTER_PORT": port}
    environment.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # its store is that of the ranks themselves
    begin = time.monotonic()
    said: list[str] = []
    row, outcome = "", ""
    with subprocess.Popen(
        [sys.executable, "-u", *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        lines: queue.Queue[str | None] = queue.Queue()
        reader = threading.Thread(target=_read, args=(process.stdout, lines))
        reader.start()
        try:
            while (line := lines.get(timeout=silence_s)) is not None:
                if line.startswith(ROW):
                    row = line.removeprefix(ROW)
                elif line:
                    said.append(line)
        except queue.Empty:
            outcome = f"hangs: silent for {silence_s:.0f} s after {_last_step(said)}"
            process.kill()
        code = process.wait()
        reader.join()
    if code and not outcome:
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        outcome = f"crashes after {_last_step(said)} ({how}): {_last(said, 'rror', 'what():', 'nforce')}"
    return End(time.monotonic() - begin, outcome, row)


def _read(stream: TextIO, lines: queue.Queue[str | None]) -> None:
    for line in stream:
        lines.put(line.strip())
    lines.put(None)


def _last_step(said: list[str]) -> str:
    return next((line[:SHORT] for line in reversed(said) if line.startswith("step ")), "its start")


def _last(said: list[str], *words: str) -> str:
    """The last line with one of these words."""
    return next((line[:SHORT] for line in reversed(said) if any(word in line for word in words)), "nothing")
