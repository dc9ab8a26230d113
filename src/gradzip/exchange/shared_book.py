"""The shared code book of `gcomp:book=shared`: made anew from all ranks' gradients every `refresh` steps, as in GComp.

A step that refreshes counts the exponents of its own gradients while it codes them with the old book. After its last
bucket all ranks add up their counts, and each makes the same book of them. It is installed two steps later, on all
ranks at once, whenever the sum arrived. (GComp, SoCC '24, section 4: rebuilt every 50 iterations, the default.)
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

import torch

from .. import saved
from ..codecs import books
from ..codecs.books import Book
from ..errors import Corrupt, PeerError, Unsupported

DELAY = 2  # steps from the count of exponents to the book made of it


class SharedBook:
    """The book that a handle's encoders use: the one shipped with the package until there is a newer one."""

    def __init__(self) -> None:
        self._book: Book | None = None
        self._coming: Book | None = None
        self._due = -1  # the step that it is installed at
        self._made = threading.Event()

    def at(self, step: int) -> Book | None:
        """The book for a step; None: the prior."""
        if 0 <= self._due <= step:
            if not self._made.wait(60):
                raise PeerError(f"the code book for step {step} has not arrived: another rank fell behind or failed")
            self._book, self._coming, self._due = self._coming or self._book, None, -1
        return self._book

    def wants(self, step: int, every: int) -> bool:
        """Whether exponents are counted in this step."""
        return step % every == 0

    def expect(self, step: int) -> None:
        """Exponents are counted in this step."""
        self._due, self._coming = step + DELAY, None
        self._made.clear()

    def make(self, counts: torch.Tensor, limit: int) -> None:
        """Makes the book of what all ranks have counted, with codes of at most so many bits."""
        if int(counts.sum()):
            self._coming = books.make(counts, limit)
            books.install(self._coming)
        self._made.set()

    # -- checkpoints --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, torch.Tensor | int | float]:
        state: dict[str, torch.Tensor | int | float] = {}
        if self._book is not None:
            state["book/lengths"] = self._book.lengths.clone()
        if self._coming is not None:
            state |= {"book/coming": self._coming.lengths.clone(), "book/due": self._due}
        return state

    def load_state_dict(self, state: Mapping[str, torch.Tensor | int | float]) -> None:
        self._book, self._coming, self._due = self.read_state(state)
        for book in (self._book, self._coming):
            if book is not None:
                books.install(book)
        if self._coming is not None:
            self._made.set()

    @staticmethod
    def read_state(state: Mapping[str, torch.Tensor | int | float]) -> tuple[Book | None, Book | None, int]:
        """The book, the coming one and when that is due; Unsupported if they are none."""

        def read(key: str) -> Book | None:
            if key not in state:
                return None
            lengths = state[key]
            if not isinstance(lengths, torch.Tensor) or lengths.dtype != torch.uint8 or lengths.shape != (256,):
                raise saved.refuse(key, lengths, "a uint8 tensor of 256 code lengths")
            try:
                return books.of_lengths(lengths.cpu())
            except Corrupt as error:
                raise Unsupported(f"the state's {key!r} cannot be used, as {error}: {saved.CURE}") from None

        book, coming = read("book/lengths"), read("book/coming")
        return book, coming, saved.counter(state, "book/due") if coming is not None else -1
