"""A race on real training steps: each candidate trains a few of them in turn, and those that fall behind go out.

This is arithmetic alone. All ranks hand in the same seconds, so all of them take the same candidate next.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

SETTLING, COUNTED = 1, 3  # steps of a block that do not count, and that do
ROUNDS, MOST_ROUNDS = 4, 8  # the latter where blocks of one candidate differ much
NOISY = 0.05  # relative: they do from here on
FAR_BEHIND = 1.3  # times the leader's step: enough to go out after the first round
TIE = 0.02  # relative: below it, steps are equally long
_SURE = 2.5  # standard errors of a difference
_LEAST_SPREAD = 0.01  # of blocks, relative: fewer than that a few blocks cannot tell


class Race:
    """Of candidates whose steps are equally long, the one with the lowest number wins."""

    def __init__(self, candidates: int) -> None:
        self.times: list[list[float]] = [[] for _ in range(candidates)]  # of each candidate's blocks, in seconds a step
        self.winner: int | None = None
        self._left = list(range(candidates))
        self._to_come = list(self._left)  # in this round
        if candidates == 1:
            self.winner = 0

    @property
    def current(self) -> int | None:
        """The candidate whose block it is; None: the race is over."""
        return None if self.winner is not None else self._to_come[0]

    def end_block(self, seconds: float) -> None:
        """The block of the current candidate is over; so long its steps took on the slowest rank."""
        self.times[self._to_come.pop(0)].append(seconds)
        if not self._to_come:
            self._end_round()

    def seconds(self, candidate: int) -> float:
        """A candidate's step so far."""
        return statistics.median(self.times[candidate])

    def _end_round(self) -> None:
        rounds = len(self.times[self._left[0]])
        best = min(map(self.seconds, self._left))
        spread = _spread([self.times[candidate] for candidate in self._left])
        within = FAR_BEHIND if rounds == 1 else 1 + max(TIE, _SURE * spread * math.sqrt(2 / rounds))
        order = [candidate for candidate in self._left if self.seconds(candidate) <= best * within]
        if len(order) == 1 or rounds >= (MOST_ROUNDS if spread > NOISY else ROUNDS):
            self.winner = min(c for c in self._left if self.seconds(c) <= best * (1 + TIE))
        # The other way round next time: so a machine that becomes slower or faster favours none.
        self._left = order[::-1]
        self._to_come = list(self._left)


def _spread(times: Sequence[Sequence[float]]) -> float:
    """How far blocks of one candidate are apart: the standard deviation relative to their mean, over all candidates."""
    if len(times[0]) < 2:
        return _LEAST_SPREAD
    relative = [statistics.variance(each) / statistics.fmean(each) ** 2 for each in times]
    return max(_LEAST_SPREAD, math.sqrt(statistics.fmean(relative)))
