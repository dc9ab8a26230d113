"""Sees every stage of every chunk: for how long data was under way, and, while somebody records, what happened when."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

Probe = Callable[[str, int, int], None]  # what (agree, code, coded or start), stage, and number


class Moment(NamedTuple):
    """Something that took time: `track` is the stage of a chunk; seconds are those of time.perf_counter."""

    track: str
    name: str
    begin: float
    end: float


class Watch:
    """The runner's probe. Its threads call `saw`; another probe, that of a test, is called first."""

    def __init__(self, also: Probe | None = None) -> None:
        self._also = also
        self._lock = threading.Lock()
        self._under_way: dict[int, tuple[int, float]] = {}  # by chunk: stage and start of its exchange
        self._coding: dict[tuple[int, int], float] = {}
        self._since = 0.0
        self._wire_s = 0.0
        self._moments: list[Moment] | None = None
        self._names: dict[int, str] = {}
        self._elsewhere = 0

    def saw(self, kind: str, stage: int, number: int, what: str = "") -> None:
        """`number`: of the chunk; `what`: in words."""
        if self._also is not None:
            self._also(kind, stage, number)
        now = time.perf_counter()
        what = what if self._moments is not None and kind in ("code", "start") else ""
        with self._lock:
            if kind in ("code", "coded", "start"):
                self._arrived(number, now)
            if kind == "start":
                if not self._under_way:
                    self._since = now
                self._under_way[number] = stage, now
            elif kind == "code":
                self._coding[stage, number] = now
            elif kind == "coded":
                begun = self._coding.pop((stage, number), now)
                self._note(f"coding, stage {stage}", number, begun, now)
            if what:
                self._names[number] = what

    def began_elsewhere(self, what: str) -> Callable[[], None]:
        """Data is under way that no chunk carries, until what is returned here is called."""
        now = time.perf_counter()
        with self._lock:
            self._elsewhere -= 1
            number = self._elsewhere
            if not self._under_way:
                self._since = now
            self._under_way[number] = 0, now
            if self._moments is not None:
                self._names[number] = what

        def ended() -> None:
            with self._lock:
                self._arrived(number, time.perf_counter())

        return ended

    def wire_seconds(self) -> float:
        """In which at least one exchange was under way, so far."""
        with self._lock:
            return self._wire_s + (time.perf_counter() - self._since if self._under_way else 0.0)

    def record(self) -> None:
        """Keeps what happens from now on."""
        with self._lock:
            self._moments, self._names = [], {}

    def recorded(self) -> list[Moment]:
        """What happened, without a further record of it."""
        with self._lock:
            found, self._moments = self._moments or [], None
            return found

    def _arrived(self, number: int, now: float) -> None:
        stage, begun = self._under_way.pop(number, (0, None))
        if begun is None:
            return
        self._note(f"wire, stage {stage}", number, begun, now)
        if not self._under_way:
            self._wire_s += now - self._since

    def _note(self, track: str, number: int, begun: float, now: float) -> None:
        if self._moments is not None:
            name = self._names.get(number, "")
            self._moments.append(Moment(track, f"chunk {number}: {name}" if number >= 0 else name, begun, now))
