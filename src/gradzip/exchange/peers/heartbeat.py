"""Who is alive, and what went wrong: heartbeats and last words, over the store that the ranks met at.

A rank is dead when its heartbeat stops, never because it is slow: it may evaluate or save for minutes. The heart beats
in a thread of its own and on a connection of its own, because a store's client serves one caller at a time. A second
thread watches the first, which may be stuck in the network.

A rank that fails leaves word in the store before it closes its connections, so that the others, who notice the closed
connections at once, can say why.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable

from torch.distributed.distributed_c10d import Store

from ...errors import PeerError
from . import sockets
from .standing import Standing

_PERIOD = 0.5  # seconds between looks at the store; heartbeats follow at a tenth of the timeout
_LAST_WORDS, _HEARD = "failed", "heard"
_RECENT = 10.0  # seconds in which a process that stood still learns that others gave it up
_HOST_LOST = 3.0  # seconds of refused connections after which the store's host counts as dead


class Health:
    """Heartbeats of `world` ranks; calls `on_loss` once, with the first bad news."""

    def __init__(
        self,
        store: Store,
        rank: int,
        world: int,
        timeout: float,
        on_loss: Callable[[PeerError], None],
        standing: Standing | None = None,
    ) -> None:
        """`standing`: what goes along with the heartbeat."""
        self._standing = standing
        self._rank, self._world, self._timeout, self._on_loss = rank, world, timeout, on_loss
        before = sockets.found()
        self._stores = [store.clone() for _ in range(2)]  # type: ignore[attr-defined]  # for the heart, and for last words
        self._sockets = sockets.found() - before
        self._still = 0.0, 0.0  # for how many seconds this whole process stood still, and when that ended
        self._stop = threading.Event()
        self._contact = time.monotonic()
        self._refused: float | None = None
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._words = threading.Lock()
        self._threads = [
            threading.Thread(target=target, name=f"gradzip-{name}", daemon=True)
            for name, target in (("heart", self._beat), ("watch", self._watch))
        ]

    def start(self) -> None:
        """After all ranks have made their groups."""
        if self._world > 1:
            for thread in list(self._threads):
                thread.start()

    def stop(self, patience: float = 2 * _PERIOD) -> bool:
        """Ends the threads; False if one is stuck in the network for longer than that, until the process ends."""
        self._stop.set()
        deadline = time.monotonic() + patience
        for thread in list(self._threads):
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads if thread is not threading.current_thread())

    def abort(self) -> None:
        """Ends waits for a store that does not answer, at the end of the process.

        A thread that came back from one when Python has shut down would take the process down.
        """
        self._stop.set()
        sockets.shut_down(self._sockets)

    def stood_still(self) -> float | None:
        """For how long this process has just stood still, if the others must take it for dead; None: it did not."""
        seconds, ended = self._still
        return seconds if seconds > 0.8 * self._timeout and time.monotonic() - ended < _RECENT else None

    # -- last words ---------------------------------------------------------------------------------------------

    def report(self, text: str, about: int | None = None, patience: float = 2.0) -> None:
        """Leaves word for the others; the first one counts. `about` is the rank at fault, by default this one."""
        words = json.dumps({"about": self._rank if about is None else about, "by": self._rank, "text": text})

        def leave() -> None:
            with contextlib.suppress(Exception), self._words:  # nobody is left to hear it
                self._stores[1].compare_set(_LAST_WORDS, "", words)
                self._stores[1].set(f"{_HEARD}/{self._rank}", "1")

        self._aside(leave, patience)

    def cause(self, patience: float) -> PeerError | None:
        """What a rank left word of, waiting that many seconds for it."""
        deadline = time.monotonic() + patience
        while True:
            with contextlib.suppress(Exception), self._words:
                if (error := self._read_words(self._stores[1])) is not None:
                    return error
            if time.monotonic() > deadline or self._stop.is_set():
                return None
            time.sleep(0.05)

    def exchange_texts(self, key: str, text: str, ranks: list[int], patience: float = 5.0) -> list[str]:
        """Each rank's text on the same matter, as far as it comes in time."""
        texts = dict.fromkeys(ranks, "(it did not say)")
        texts[self._rank] = text
        missing = [rank for rank in ranks if rank != self._rank]
        deadline = time.monotonic() + patience
        with contextlib.suppress(Exception):  # who has read them all may leave, and the store with it
            self._set(f"{key}/{self._rank}", text)
            while missing and time.monotonic() < deadline and not self._stop.is_set():
                for rank in list(missing):
                    if (found := self._get(f"{key}/{rank}")) is not None:
                        texts[rank] = found
                        missing.remove(rank)
                if missing:
                    time.sleep(0.02)
        return [texts[rank] for rank in ranks]

    def all_know(self, patience: float) -> None:
        """Waits until the others have heard what went wrong, or for that many seconds.

        For a rank whose process may hold the store: the words are gone when it ends.
        """
        deadline = time.monotonic() + patience

        def wait() -> None:
            unaware = [rank for rank in range(self._world) if rank != self._rank]
            with contextlib.suppress(Exception):
                while unaware and time.monotonic() < deadline:
                    unaware = [rank for rank in unaware if self._get(f"{_HEARD}/{rank}") is None]
                    if unaware:
                        time.sleep(0.02)

        self._aside(wait, patience)

    def _aside(self, target: Callable[[], None], patience: float) -> None:
        """Runs it in a thread of its own, as the store may be out of reach; returns after that many seconds at most."""
        thread = threading.Thread(target=target, name="gradzip-words", daemon=True)
        with contextlib.suppress(RuntimeError):  # Python is about to end, and starts no more threads
            thread.start()
            self._threads.append(thread)
            thread.join(patience)

    def _set(self, key: str, text: str) -> None:
        with self._words:
            self._stores[1].set(key, text)

    def _get(self, key: str) -> str | None:
        with self._words:
            return self._stores[1].get(key).decode() if self._stores[1].check([key]) else None

    def _read_words(self, store: Store) -> PeerError | None:
        if not store.check([_LAST_WORDS]):
            return None
        words = json.loads(store.get(_LAST_WORDS).decode() or "{}")
        if not words:
            return None
        with contextlib.suppress(Exception):  # who left them may be gone by now, and the store with it
            store.set(f"{_HEARD}/{self._rank}", "1")
        failed = words["about"] == words["by"]
        return PeerError(f"rank {words['about']} failed: {words['text']}" if failed else words["text"])

    # -- threads ------------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        store, count, due = self._stores[0], 0, 0.0
        names = [f"beat/{rank}" for rank in range(self._world)]
        while not self._stop.wait(_PERIOD if count else 0.0):
            now = time.monotonic()
            try:
                if now >= due:
                    count += 1
                    store.set(names[self._rank], f"{count} {self._standing or ''}")
                    if (text := self._look(store, names)) is not None:
                        self.report(text, about=-1)
                        self._on_loss(PeerError(text))
                        return
                    due = now + min(self._timeout / 10, 3.0)
                error = self._read_words(store)
            except Exception as reason:  # the store's host is gone, or the network is
                if self._refused is None:
                    self._refused = now
                elif now - self._refused > _HOST_LOST:
                    self._lose(
                        f"rank {self._rank} lost the store that all ranks met at, which rank 0 or the launcher hosts: "
                        f"that process is dead, or the network to it is down ({_first_line(reason)})"
                    )
                    return
                continue
            self._contact, self._refused = time.monotonic(), None
            if error is not None:
                self._on_loss(error)
                return

    def _look(self, store: Store, names: list[str]) -> str | None:
        """Whose hearts beat; what a rank does that this one does not."""
        for rank, name in enumerate(names):
            if rank == self._rank:
                continue
            beat = store.get(name) if store.check([name]) else b""
            last = self._seen.get(rank)
            if last is None or last[0] != beat:
                self._seen[rank] = (beat, time.monotonic())
            standing = beat.decode().partition(" ")[2]
            if standing and self._standing is not None:
                different = self._standing.difference(rank, standing)
                if different is not None:
                    return different
        return None

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._stop.wait(_PERIOD):
            now = time.monotonic()
            if now - last > 5 * _PERIOD:  # it was this process that stood still: let the heart look again first
                self._contact, self._still = now, (now - last, now)
                self._seen = {rank: (beat, now) for rank, (beat, _) in self._seen.items()}
            last = now
            if now - self._contact > self._timeout:
                self._lose(
                    f"rank {self._rank} has not reached the store on rank 0 for {self._timeout:.0f} s: "
                    "its network is down, or that rank is dead or stopped"
                )
                return
            cut_off = now - self._contact > self._timeout / 2  # then nothing is known of the others
            for rank, (_, since) in list(self._seen.items()):
                if now - since > self._timeout and not cut_off:
                    text = f"rank {rank} has shown no sign of life for {self._timeout:.0f} s: "
                    text += "it is dead, stopped, or cut off from the network"
                    self.report(text, about=rank)
                    self._on_loss(PeerError(text))
                    return

    def _lose(self, text: str) -> None:
        if not self._stop.is_set():
            self._on_loss(PeerError(text))


def _first_line(reason: BaseException) -> str:
    return (str(reason).splitlines() or [""])[0]
