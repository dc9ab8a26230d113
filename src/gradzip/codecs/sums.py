"""Sums in float64 whose order is the same on every device and for every way of cutting work up.

torch.sum has an order of its own on each device, which depends on the shape. Statistics of a codec must not: a part
coded by itself on a CPU and the same part coded beside others on a GPU have to give the same frame. Here values lie in
rows of 32 lanes. Groups of 32 rows are folded in halves until one row is left, then that row's lanes are. Additions of
whole tensors are exact to the bit on every device, and zeros at the end change nothing.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import pad

LANES, GROUP = 32, 32  # values of a row; rows that are folded into one
_CHUNK = 1 << 16  # values that a CPU folds at once, in its cache; a multiple of LANES * GROUP


def ordered_sum(x: torch.Tensor) -> torch.Tensor:
    """The sum of each row of a matrix, in float64."""
    if x.device.type == "cpu":  # NumPy takes a quarter of the time for each operation
        with np.errstate(invalid="ignore", over="ignore"):
            return torch.from_numpy(_of_array(x.numpy()))
    return on_device(x)


def on_device(x: torch.Tensor) -> torch.Tensor:
    """The same by torch's operations."""
    rows = pad(x.double(), (0, -x.shape[1] % LANES)).view(len(x), -1, LANES)
    while rows.shape[1] > 1:
        group = group_of(rows.shape[1])
        rows = folded(pad(rows, (0, 0, 0, -rows.shape[1] % group)).view(len(x), -1, group, LANES), 2)
    return folded(rows, 2).sum(1)  # of one row, or none


def group_of(rows: int) -> int:
    """How many of so many rows are folded at once: a power of two."""
    return min(GROUP, 1 << max(rows - 1, 0).bit_length())


def folded(x: torch.Tensor, dim: int) -> torch.Tensor:
    """The sum over a dimension of 2^n: the second half is added to the first, until one is left."""
    while x.shape[dim] > 1:
        first, second = x.chunk(2, dim)
        x = first + second
    return x.select(dim, 0)


Matrix = npt.NDArray[np.floating]


def _of_array(x: Matrix) -> npt.NDArray[np.float64]:
    """The same in NumPy."""
    if x.shape[1] > _CHUNK:  # what a level makes of each chunk
        groups = [_level(x[:, first : first + _CHUNK], GROUP) for first in range(0, x.shape[1], _CHUNK)]
        rows = np.concatenate(groups, 1)
        x = rows.reshape(len(rows), -1)
    while x.shape[1] > LANES:
        rows = _level(x, group_of(-(-x.shape[1] // LANES)))
        x = rows.reshape(len(rows), -1)
    return _halves(_padded(x, LANES), 1) if x.shape[1] else np.zeros(len(x))


def _level(x: Matrix, group: int) -> npt.NDArray[np.float64]:
    return _halves(_padded(x, group * LANES).reshape(len(x), -1, group, LANES), 2)


def _padded(x: Matrix, to: int) -> npt.NDArray[np.float64]:
    count = x.shape[1]
    if count % to == 0:
        return x.astype(np.float64)
    padded = np.zeros((len(x), -(-count // to) * to))
    padded[:, :count] = x
    return padded


def _halves(x: npt.NDArray[np.float64], axis: int) -> npt.NDArray[np.float64]:
    x = np.moveaxis(x, axis, 1)
    while x.shape[1] > 1:
        half = x.shape[1] // 2
        x = x[:, :half] + x[:, half:]
    return x[:, 0]
