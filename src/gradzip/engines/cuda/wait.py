"""Waiting for what kernels tell the host: words in its own memory that carry the number of the launch.

Looking there is quicker than asking the driver. An encoder's sizes are there before the kernel has ended, so that the
host can go on; the bytes are there for what comes next on the stream.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from itertools import repeat
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ...errors import EngineError
from .workspace import MOST_TENSORS, Workspace

if TYPE_CHECKING:
    from .launch import Launcher

# How often a word is looked at: at once, about 0.1 us each; giving other threads a turn, about 0.5 us each; after naps,
# about 60 us each. Then the driver is asked to wait.
LOOKS, YIELDS, NAPS = 300, 10_000, 2000
SIZE_BITS = 40  # of a word that tells a size; then a bit that tells of a status, then the launch's number
SIZE = (1 << SIZE_BITS) - 1
_STATUS_BITS = 32


def for_sizes(on: Launcher, stream: int, space: Workspace, count: int) -> tuple[list[int], int]:
    """The sizes of the bodies that the latest launch encodes, and the status word, which is cleared."""
    sizes, flawed = [], False
    for place in range(count):
        word = _told(on, stream, space, place, SIZE_BITS + 1)
        sizes.append(word & SIZE)
        flawed |= word >> SIZE_BITS & 1 != 0
    if not flawed:
        return sizes, 0
    on.wait(stream)
    status = int(space.status.item())
    space.status.zero_()
    return sizes, status


def for_words(on: Launcher, stream: int, space: Workspace, row: int, count: int, epoch: int) -> npt.NDArray[np.int64]:
    """What the launch of that number tells of its bodies, in a row of the workspace."""
    words = space.words(row, count)
    _await(on, stream, lambda: bool((words >> (SIZE_BITS + 1) == epoch).all()))
    return words.copy()


def for_status(on: Launcher, stream: int, space: Workspace) -> int:
    """The status word of the latest launch, a decoder's, once all values are written; it is cleared."""
    status = _told(on, stream, space, MOST_TENSORS, _STATUS_BITS) & ((1 << _STATUS_BITS) - 1)
    if status:
        space.status.zero_()
    return status


def _nap() -> None:
    time.sleep(0)


def _told(on: Launcher, stream: int, space: Workspace, place: int, shift: int) -> int:
    """The word at that place, once it is that of the latest launch."""
    told, epoch = space.told, space.epoch
    for _ in range(LOOKS):
        word = told[place]
        if word >> shift == epoch:
            return word
    _await(on, stream, lambda: told[place] >> shift == epoch)
    return told[place]


def _await(on: Launcher, stream: int, told: Callable[[], bool]) -> None:
    """Looks until it is told, with pauses that grow."""
    if told():
        return
    for rest in repeat(os.sched_yield, YIELDS), repeat(_nap, NAPS):
        for give_way in rest:  # both give Python's lock away
            give_way()
            if told():
                return
    on.wait(stream)
    if not told():
        raise EngineError("a kernel of the cuda engine has ended without a result")
