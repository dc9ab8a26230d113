"""What a command is doing, on stderr, once it has taken longer than two seconds."""

from __future__ import annotations

import sys
import threading
from types import TracebackType

SILENT = 2.0  # seconds that need no explanation


class Progress:
    """`with Progress() as say: say("what comes now")`. On a terminal one line that changes, elsewhere plain lines."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._text = ""
        self._shows = False
        self._timer = threading.Timer(SILENT, self._begin)
        self._timer.daemon = True

    def __enter__(self) -> Progress:
        self._timer.start()
        return self

    def __call__(self, text: str) -> None:
        with self._lock:
            self._text = text
            if self._shows:
                self._print()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._timer.cancel()
        with self._lock:
            if self._shows and sys.stderr.isatty():
                sys.stderr.write("\r\x1b[K")
                sys.stderr.flush()
            self._shows = False
            self._text = ""

    def _begin(self) -> None:
        with self._lock:
            self._shows = True
            if self._text:
                self._print()

    def _print(self) -> None:
        line = f"gradzip: {self._text}"
        sys.stderr.write(f"\r\x1b[K{line}" if sys.stderr.isatty() else f"{line}\n")
        sys.stderr.flush()
