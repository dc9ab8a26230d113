"""The pieces of whole messages on a GPU, as rows of a table: no Python runs for each of them.

Rows have the fields of the native engine's PIECE; addresses are those of the device. Everything is enqueued on the
current stream, in launches of up to 16 pieces. `encode` waits once, for the sizes; `check` once, for what became of all
that was decoded.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from ...errors import Corrupt
from ..layout import BLOCK, FIXED, NEAR, Job
from ..native import PIECE as PIECE  # part of the engine's interface
from ..native import Pieces
from ..native import floor_columns as floor_columns
from . import launch, wait
from .launch import ARGS_BYTES, TENSOR, Batch, Launcher, Rows
from .workspace import MOST_TENSORS, Workspace

NAME = "cuda"
Column = npt.NDArray[np.int64]

_KINDS = ("kNoFloor", "kInt8Floor", "kThetaFloor", "kSecondFloor")
_HEAD = struct.Struct("<8Q13i3I")  # Args of common.cuh before its tensors
_THREADS, _MOST_GROUPS = 256, 4096
_AS_THEY_ARE, _KEPT, _ON_GRID = "kAsTheyAre", "kKept", "kOnGrid"


def encode(
    pieces: Pieces, bodies: Column, job: Job, device: torch.device, sleep: Callable[[], None] = lambda: None
) -> Column:
    """Writes the body of each piece to its address; returns their sizes. Those that are `exact` go lossless.

    `sleep` returns when the stream is through, which may still work for others before: looking for sizes all that time
    would take the processor from them. Corrupt if a launch before it on this stream, which nobody has waited for, found
    a damaged body.
    """
    on, stream, space = _where(device)
    sizes, runs = np.zeros(len(pieces), np.int64), list[tuple[npt.NDArray[np.intp], int, int]]()
    rows = _rows(pieces)
    rows["body"] = bodies
    space.make_room(len(pieces))
    for coding, used, which, floor in _alike(pieces, job):
        for some in _sixteens(which):
            batch = Batch(device, torch.float32, floor, False, rows[some])
            row, epoch = _launch(batch, coding, used, True, len(runs), on, stream, space)
            runs.append((some, row, epoch))
    sleep()
    flawed = False
    for some, row, epoch in reversed(runs):  # when the last one has told, all have
        words = wait.for_words(on, stream, space, row, len(some), epoch)
        sizes[some] = words & wait.SIZE
        flawed |= bool((words >> wait.SIZE_BITS & 1).any())
    if flawed:
        _raise(on, stream, space)
    return sizes


def decode(
    bodies: Column,
    sizes: Column,
    near: npt.NDArray[np.bool_],
    pieces: Pieces,
    shift: int,
    add: bool,
    device: torch.device,
) -> None:
    """Puts what bodies hold into the pieces' values, or adds it to what is there; `check` tells what was wrong.

    `near`: those that are of near mode, which their floors are needed for.
    """
    on, stream, space = _where(device)
    rows = _rows(pieces)
    rows["body"], rows["body_bytes"] = bodies, sizes
    rows["addend"] = rows["values"] if add else 0
    kinds = np.where(near, _floor_kinds(pieces), 0)
    for kind in _occurring(kinds):
        coding = NEAR if kind else FIXED
        for some in _sixteens(np.flatnonzero(kinds == kind)):
            batch = Batch(device, torch.float32, _KINDS[kind], add, rows[some])
            _launch(batch, coding, Job("near", shift=shift), False, 0, on, stream, space)


def check(device: torch.device) -> None:
    """Waits for all that this thread has enqueued; Corrupt if a body that was decoded is damaged."""
    on, stream, space = _where(device)
    on.wait(stream)
    if int(space.status.item()):
        _raise(on, stream, space)


def round_values(
    pieces: Pieces, job: Job, device: torch.device, out: Column | None, add: bool = False, unit: float = 1.0
) -> None:
    """Rounds values to what others decode of them: into `out`, or added to what is there; None: nowhere.

    What that takes from them, divided by `unit`, goes to `lost` where that is set.
    """
    rows = _rows(pieces)
    rows["addend"], rows["body"] = 0 if out is None else out, pieces["lost"]
    (scale,) = struct.unpack("<i", struct.pack("<f", unit))
    for coding, used, which, floor in _alike(pieces, job):
        rounding = _AS_THEY_ARE if used.mode == "lossless" else _KEPT if coding == FIXED else _ON_GRID
        numbers = used.shift, scale, int(add), used.keep, *launch.rounding(used.keep, used.truncate)
        _run_plainly(f"pieces_round<{rounding}, {floor}>", rows[which], numbers, device)


def copy(sources: Column, targets: Column, sizes: Column, device: torch.device) -> None:
    """Copies whole words, from the device to the device or to pinned memory."""
    rows = np.zeros(len(sizes), TENSOR)
    rows["values"], rows["body"], rows["numel"] = sources, targets, sizes // 4
    _run_plainly("pieces_copy", rows, (0, 0, 0, 0, 0, 0, 0, 0), device)


# --- Inside ------------------------------------------------------------------------------------------------------


def _where(device: torch.device) -> tuple[Launcher, int, Workspace]:
    on = launch.launcher(device)
    stream = on.stream()
    return on, stream, launch.workspace(device, stream)


def _rows(pieces: Pieces) -> Rows:
    rows = np.zeros(len(pieces), TENSOR)
    rows["values"], rows["numel"], rows["lengths"] = pieces["values"], pieces["n"], pieces["lengths"]
    rows["floors"] = np.where(pieces["theta"] != 0, pieces["theta"], pieces["given"])
    for name in ("second", "c0", "c1", "c2"):
        rows[name] = pieces[name]
    return rows


def _floor_kinds(pieces: Pieces) -> npt.NDArray[np.intp]:
    """Numbers in _KINDS."""
    computed = np.where(pieces["second"] != 0, 3, 2)
    kinds: npt.NDArray[np.intp] = np.where(pieces["theta"] != 0, computed, pieces["given"] != 0)
    return kinds


def _occurring(kinds: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
    """Each kind once; np.unique takes ten times as long for so few."""
    return np.flatnonzero(np.bincount(kinds))


def _alike(pieces: Pieces, job: Job) -> Iterator[tuple[int, Job, npt.NDArray[np.intp], str]]:
    """Pieces of equal coding and kind of floor: the coding, the job, which ones, and the kind."""
    exact = pieces["exact"] != 0 if job.mode == "near" else np.ones(len(pieces), bool)
    kinds = np.where(exact, 0, _floor_kinds(pieces))
    for kind in _occurring(kinds):
        plain = job if job.mode != "near" else Job("lossless", limit=job.limit, book=job.book)
        coding, used = (NEAR, job) if kind else (FIXED, plain)
        yield coding, used, np.flatnonzero(kinds == kind), _KINDS[kind]


def _sixteens(which: npt.NDArray[np.intp]) -> Sequence[npt.NDArray[np.intp]]:
    return [which[first : first + MOST_TENSORS] for first in range(0, len(which), MOST_TENSORS)]


def _launch(
    batch: Batch, coding: int, job: Job, encodes: bool, number: int, on: Launcher, stream: int, space: Workspace
) -> tuple[int, int]:
    """Launches what codes these pieces; where sizes will be told, and the number of the launch.

    A launch is kept for pieces of the same sizes, wherever they are.
    """
    key = "pieces", coding, job, encodes, batch.floor, batch.adds, batch.rows["numel"].tobytes()
    known = space.prepared.get(key)
    if known is None:
        known = launch.make(batch, coding, job, encodes, on, stream, space)
        launch.remember(space, key, known)
    assert isinstance(known, launch.Launch | launch.SmallLaunch)
    known.refill(batch.rows, space.row_of_told(number))
    known.run()
    return number, space.epoch


def _run_plainly(kernel: str, rows: Rows, numbers: Sequence[int], device: torch.device) -> None:
    """A kernel whose groups take 4096 values after the other; `numbers`: shift, limit, small, and from keep to mask."""
    on, stream, _ = _where(device)
    launch.ready(on, kernel, _THREADS)
    shift, limit, small, *rest = numbers
    for some in _sixteens(np.arange(len(rows))):
        part = rows[some]
        groups = -(-part["numel"].astype(np.int64) // BLOCK)
        part["first_group"] = groups.cumsum() - groups
        count = int(groups.sum())
        if count:
            head = _HEAD.pack(0, 0, 0, 0, 0, 0, 0, 0, len(part), count, 0, 0, 0, shift, limit, small, *rest, 0, 0, 0)
            arguments = ctypes.create_string_buffer(head + part.tobytes(), ARGS_BYTES)
            on.bind(kernel, arguments, min(count, _MOST_GROUPS), _THREADS, stream)()


def _raise(on: Launcher, stream: int, space: Workspace) -> None:
    on.wait(stream)
    space.status.zero_()
    raise Corrupt("a body is damaged")
