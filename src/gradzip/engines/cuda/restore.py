"""Takes back what a step noted for the next one, if its means are not finite: the host enqueues it and does not ask.

kernels/restore.cuh does the work. In ordinary steps it costs a launch and moves no data.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch

from . import launch

_HEAD, _REGION = struct.Struct("<3Q"), struct.Struct("<3Q")
_MOST = 64  # regions of a launch
_THREADS = 256  # as in restore.cuh
_EACH, _MOST_GROUPS = 8, 1024  # values of a thread, where groups suffice


class Change(NamedTuple):
    """A tensor as a step has written it, and as it was before; of numbers of 4 bytes, contiguous and equally large."""

    now: torch.Tensor
    before: torch.Tensor


def restore(norms: torch.Tensor, changes: Sequence[Change]) -> None:
    """Enqueues on the current stream: unless all `norms` (float64, not negative) are finite, `before` goes to `now`."""
    on = launch.launcher(norms.device)
    launch.load_once(on, "restore", _THREADS, 1)
    for first in range(0, len(changes), _MOST):
        some = changes[first : first + _MOST]
        groups = min(max(now.nbytes for now, _ in some) // (4 * _EACH * _THREADS) + 1, _MOST_GROUPS)
        packed = bytearray(_HEAD.pack(norms.data_ptr(), norms.numel(), len(some)))
        for now, before in some:
            assert now.nbytes == before.nbytes and now.nbytes % 4 == 0
            packed += _REGION.pack(before.data_ptr(), now.data_ptr(), now.nbytes // 4)
        arguments = ctypes.create_string_buffer(bytes(packed), launch.ARGS_BYTES)
        on.bind("restore", arguments, groups, _THREADS, on.stream())()
