"""The row of checks of a step, filled by one launch for all of its messages; kernels/noise_row.cuh does the work."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from . import launch
from .launch import Launcher
from .noise import to_device
from .noise_message import NoiseKernels

ALIKE = 3  # numbers that all ranks must have alike: a digest, a sum of shapes, and one of results
OF_FRAMES = 4  # numbers beside the status: bytes and notch of the largest frame for another rank, and of the sum's
OF_RANK = 2  # numbers of this rank alone: its noise, and how many of its frames are coarser
_THREADS = 256
_ROW = struct.Struct("<5Q")
_CHECK = np.dtype(
    [(name, "<u8") for name in ("squares", "blocks", "levels", "tensors", "status", "own", "owners", "sum", "frames")]
    + [(name, "<u8") for name in ("norm_at", "frames_at", "own_at")]
    + [("divisor", "<f8")]
)


class Places(NamedTuple):
    """Where the numbers of a message are in the row: its norm, those of its frames, and those of this rank."""

    norm: int
    frames: int
    own: int


class RowCall:
    """Fills a row on the current stream, which begins with the numbers that are alike, each with its negative."""

    def __init__(self, row: torch.Tensor, messages: Sequence[NoiseKernels], places: Sequence[Places]) -> None:
        checks = np.zeros(len(messages), _CHECK)
        for check, message, place in zip(checks, messages, places):
            check["squares"], check["blocks"] = message.squares.data_ptr(), message.squares.numel()
            check["levels"], check["tensors"] = message.level_table.data_ptr(), message.level_table.numel() // 24
            check["status"], check["frames"] = message.status.data_ptr(), message.status.numel()
            check["own"], check["owners"] = message.own_results.data_ptr(), message.world - 1
            check["sum"] = message.sum_result.data_ptr()
            check["norm_at"], check["frames_at"], check["own_at"] = place
            # The variance of a sum is a third of its level squared: half of that from own gradients, half from the sum.
            check["divisor"] = 4.0**12 * 3 * message.world**2
        self._row, self._checks, self._groups = row, to_device(checks, row.device), len(messages)
        self._on = launch.launcher(row.device)
        _load(self._on)
        self._arguments = ctypes.create_string_buffer(launch.ARGS_BYTES)
        self._bound: dict[int, Callable[[], None]] = {}

    def __call__(self, digest: int, shapes: torch.Tensor | None, results: torch.Tensor | None) -> None:
        stream = self._on.stream()
        start = self._bound.get(stream)
        if start is None:
            start = self._on.bind("noise_row", self._arguments, self._groups, _THREADS, stream)
            self._bound[stream] = start
        shaped, compared = (0 if number is None else number.data_ptr() for number in (shapes, results))
        _ROW.pack_into(
            self._arguments, 0, self._checks.data_ptr(), self._row.data_ptr(), shaped, compared, digest & (1 << 64) - 1
        )
        start()


@cache
def _load(on: Launcher) -> None:
    on.load("noise_row", _THREADS, 0)
