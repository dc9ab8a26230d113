"""Kernels for the parts of other codecs where torch's own operations take several passes on a GPU.

codecs/packing.py and codecs/selection.py say what each gives; there torch's operations do the same on other devices,
and on a GPU whose torch comes without NVRTC. `gradzip doctor` says which of the two it is.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch

from ...errors import EngineError
from . import driver, launch
from .launch import Part
from .workspace import MOST_SMALL, Workspace

_THREADS = 256
_STRETCH = 8192  # values that a group of threads selects from, at least; a multiple of 256
_MOST_GROUPS = 4096  # of a kernel that needs no order
_TYPES = {2: "BFloat16", 4: "Float32"}  # only the size matters


@cache
def reason_against() -> str | None:
    """Why these kernels cannot be used on this machine's GPUs; None if they can."""
    try:
        driver.require_compiler()
    except EngineError as reason:
        return str(reason)
    return None


def serves(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and tensor.is_contiguous() and reason_against() is None


def pack_bits(values: torch.Tensor, bits: int, size: int) -> torch.Tensor:
    """A vector of uint8 values below 2^bits as `size` bytes."""
    packed = values.new_empty(size)
    if values.numel():
        _in_any_order("pack_bits", values, packed, bits)
    return packed


def unpack_bits(data: torch.Tensor, count: int, bits: int) -> torch.Tensor:
    values = data.new_empty(count)
    if count:
        _in_any_order("unpack_bits", values, data, bits)
    return values


def select_large(x: torch.Tensor, least: torch.Tensor, most: int) -> torch.Tensor | None:
    """The ascending indices of values whose magnitude, read as an integer, is at least `least`.

    None if they are more than `most`. `least` is one integer of the values' size, on their device. Waits.
    """
    space, on, stream = _where(x)
    stretch = max(_STRETCH, -(-x.numel() // MOST_SMALL // 256) * 256)
    groups = -(-x.numel() // stretch)
    while groups > MOST_SMALL:  # rounding
        stretch += 256
        groups = -(-x.numel() // stretch)
    places = torch.empty(most, dtype=torch.int64, device=x.device)
    arguments = launch.describe(Part(x, places, 8 * most, lengths=least), space, groups, keep=stretch)
    found = launch.run_ordered(f"select_large<{_TYPES[x.itemsize]}>", arguments, groups, on, stream, space)
    return places[:found] if found <= most else None


def _where(tensor: torch.Tensor) -> tuple[Workspace, launch.Launcher, int]:
    on = launch.launcher(tensor.device)
    stream = on.stream()
    return launch.workspace(tensor.device, stream), on, stream


def _in_any_order(kernel: str, values: torch.Tensor, packed: torch.Tensor, bits: int) -> None:
    space, on, stream = _where(values)
    groups = min(_MOST_GROUPS, -(-values.numel() // (8 * _THREADS)))
    arguments: ctypes.Array[ctypes.c_char] = launch.describe(Part(values, packed), space, groups, limit=bits)
    launch.ready(on, kernel, _THREADS)
    on.bind(kernel, arguments, groups, _THREADS, stream)()
