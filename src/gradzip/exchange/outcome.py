"""What came of a message, or of a whole step: bytes, times, noise, and whether all gradients were finite."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Outcome:
    """What came of a message, on this rank."""

    finite: bool = True  # the gradients of all ranks were
    error: BaseException | None = None
    bytes_sent: int = 0
    bytes_out: int = 0  # of these, to other hosts
    collectives: int = 0  # that a textbook would count
    coding: float = 0.0  # seconds
    waiting: float = 0.0
    values: int = 0  # that went through codecs of whole messages
    noise: float = 0.0  # the sum of squares of what rounding at random added to the means, as far as it is expected
    squares: float = 0.0  # of these means, their sum of squares
    allowed: float = 0.0  # how large `noise` may be, on average over steps
    coarser: int = 0  # frames that did not fit their slots at first

    def add(self, other: Outcome) -> None:
        self.finite &= other.finite
        self.error = self.error or other.error
        self.bytes_sent += other.bytes_sent
        self.bytes_out += other.bytes_out
        self.collectives += other.collectives
        self.coding += other.coding
        self.waiting += other.waiting
        self.values += other.values
        self.noise += other.noise
        self.squares += other.squares
        self.allowed += other.allowed
        self.coarser += other.coarser
