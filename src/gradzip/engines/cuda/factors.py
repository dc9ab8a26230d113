"""PowerSGD's arithmetic on a GPU: the matrices of a whole model in a dozen launches, by kernels/lowrank.cuh.

codecs/lowrank.py says what is computed. What a step has to know is found out once for a model: how its matrices are cut
into tiles, and where everything lies. The results depend on shapes and values alone, not on the GPU.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import NamedTuple

import torch

from . import launch
from .launch import Launcher

MOST_RANK = 32
_TILE_COLUMNS, _LEFT_ROWS, _GRAM_ROWS, _TOTAL_VALUES = 256, 128, 512, 64  # as in lowrank.cuh
_START_THREADS = 1024
# Rows in a sum of a right factor, by rank; the second for matrices of more than _LONG rows.
_CHUNKS, _LONG = {4: (256, 512), 8: (256, 512), 16: (512, 1024), 32: (512, 1024)}, 4096
# Columns of a tile that a thread has, and into how many parts the rank is cut, by rank: what registers can hold.
_RIGHT_SHARES = {4: (4, 1), 8: (4, 1), 16: (4, 1), 32: (4, 2)}
_MEAN_SHARES = {4: (4, 1), 8: (4, 1), 16: (2, 1), 32: (2, 2)}
_LEAST = 2  # groups of 256 threads per multiprocessor that registers must suffice for
_MOST_TABLES = 16  # that are kept: memory comes back at the same few addresses

_ARGS = struct.Struct("<12Qf3i")
_MATRIX = struct.Struct("<8Q6i")
_TILES, _TILES_AT = struct.Struct("<Q"), 8  # fields of LowRank that differ between the launches of a step
_TURN, _TURN_AT = struct.Struct("<i"), 12 * 8 + 8


class Shape(NamedTuple):
    rows: int
    columns: int


class Operands(NamedTuple):
    """Where the matrices of a step are, each of them; all of it float32 and contiguous."""

    gradients: tuple[int, ...]  # will be the means
    before: tuple[int, ...]  # what was lost of them before; 0: nothing
    starts: tuple[int, ...]  # the last right factors
    fresh: tuple[int, ...]  # the same for columns of zeros


class Result(NamedTuple):
    right: torch.Tensor  # the averaged right factors of all matrices
    after: torch.Tensor | None  # what was lost of all matrices
    flawed: torch.Tensor  # one int32, not 0 where a mean is not finite


class _Kernel(NamedTuple):
    name: str
    tiles: torch.Tensor | None  # which tiles its groups take; None: a matrix each
    groups: int
    threads: int
    turn: int = 0


@lru_cache(maxsize=16)
def plan(shapes: tuple[Shape, ...], rank: int, device: torch.device) -> Plan:
    return Plan(shapes, rank, device)


@cache
def _load(on: Launcher, kernel: str, threads: int, least: int) -> None:
    on.load(kernel, threads, 0, least)


class Plan:
    """How matrices of these shapes go through the kernels; in their order factors follow each other."""

    def __init__(self, shapes: tuple[Shape, ...], rank: int, device: torch.device) -> None:
        self._shapes, self._rank, self._device = shapes, rank, device
        self._padded = next(size for size in (4, 8, 16, 32) if rank <= size)
        self._chunks = [_CHUNKS[self._padded][shape.rows > _LONG] for shape in shapes]
        self._first_grams: list[int] = []
        self._offsets: list[tuple[int, int, int]] = []  # of left factor, right factor and sums
        left = right = parts = grams = self._values = 0
        for (rows, columns), chunk in zip(shapes, self._chunks):
            self._offsets.append((left, right, parts))
            self._first_grams.append(grams)
            left, right = left + rows * rank, right + columns * rank
            parts += -(-rows // chunk) * columns * rank
            grams += -(-rows // _GRAM_ROWS)
            self._values += rows * columns
        self._left, self._right = left, right
        self._tables: dict[tuple[object, ...], torch.Tensor] = {}  # by all addresses in them
        self._bound: dict[tuple[int, int], _Bound] = {}
        entries = self._padded**2
        # Scratch memory, in values of 4 bytes; that of doubles comes first.
        sizes = [2 * grams * entries, 4 * len(shapes) * entries, 4, right, left, left, parts]
        self._places, at = list[int](), 0
        for size in sizes:
            self._places.append(at)
            at += -(-size // 4) * 4
        self._scratch = at
        self._kernels = self._listed()

    def _listed(self) -> list[_Kernel]:
        r, count = self._padded, len(self._shapes)
        (right, right_parts), (mean, mean_parts) = _RIGHT_SHARES[r], _MEAN_SHARES[r]
        right_threads, mean_threads = _TILE_COLUMNS // right * right_parts, _TILE_COLUMNS // mean * mean_parts
        lefts = self._tiles([(_LEFT_ROWS, shape.columns) for shape in self._shapes])
        grams = self._tiles([(_GRAM_ROWS, shape.columns) for shape in self._shapes], by_size=False)
        cut = self._tiles([(chunk, _TILE_COLUMNS) for chunk in self._chunks])
        totals = self._tiles([(shape.rows, _TOTAL_VALUES) for shape in self._shapes], self._rank)
        return [
            _Kernel(f"lowrank_starts<{r}>", None, count, _START_THREADS),
            _Kernel(f"lowrank_left<{r}>", lefts, len(lefts), 256),
            _Kernel(f"lowrank_gram<{r}, 0>", grams, len(grams), 256),
            _Kernel(f"lowrank_solve<{r}>", None, count, 256),
            _Kernel(f"lowrank_gram<{r}, 1>", grams, len(grams), 256),
            _Kernel(f"lowrank_solve<{r}>", None, count, 256, turn=1),
            _Kernel(f"lowrank_basis<{r}>", grams, len(grams), 256),
            _Kernel(f"lowrank_right<{r}, {right}, {right_parts}>", cut, len(cut), right_threads),
            _Kernel("lowrank_total", totals, len(totals), 256),
            _Kernel(f"lowrank_mean<{r}, {mean}, {mean_parts}>", cut, len(cut), mean_threads),
        ]

    def _tiles(self, sizes: Sequence[tuple[int, int]], columns_times: int = 1, by_size: bool = True) -> torch.Tensor:
        """[tiles][4]: matrix, first row, first column. The largest come first, so that none is left over at the end."""
        found = [
            (number, row, column, 0)
            for number, ((rows, columns), (high, wide)) in enumerate(zip(self._shapes, sizes))
            for row in range(0, rows, high)
            for column in range(0, columns * columns_times, wide)
        ]
        if by_size:
            found.sort(key=lambda tile: -sizes[tile[0]][0] * sizes[tile[0]][1])
        return torch.tensor(found, dtype=torch.int32).to(self._device)

    def run(
        self,
        operands: Operands,
        like: torch.Tensor,
        average: Callable[[torch.Tensor], None],
        keeps: bool,
        scale: float,
        meanwhile: Callable[[], None],
    ) -> Result:
        """One step; `keeps`: what is lost is wanted. `meanwhile` is called while the GPU has something to do.

        New memory is like `like`. When this returns, the means are on the current stream.
        """
        new = like.new_empty
        scratch, right = new(self._scratch), new(self._right)
        after = new(self._values) if keeps else None
        own = new(self._right) if keeps else None
        grams, changes, flawed, starts, left, basis, parts = self._places
        on = launch.launcher(self._device)
        stream = on.stream()
        table = self._table(operands, after, stream)
        base = scratch.data_ptr()
        head = _ARGS.pack(
            table.data_ptr(), 0, base + 4 * starts, base + 4 * left, base + 4 * basis, base + 4 * parts,
            0 if own is None else own.data_ptr(), right.data_ptr(), base + 4 * grams, base + 4 * changes,
            base + 4 * flawed, len(self._shapes), scale, self._rank, 0, 0,
        )  # fmt: skip
        who = threading.get_ident(), stream
        bound = self._bound.get(who)
        if bound is None:
            bound = self._bound[who] = _Bound(self._kernels, on, stream)
        bound.prepare(head)
        bound.launch(0, 2)
        average(scratch[left : left + self._left])
        bound.launch(2, 9)
        meanwhile()
        average(right)
        bound.launch(9, 10)
        return Result(right, after, scratch[flawed : flawed + 1].view(torch.int32))

    def _table(self, operands: Operands, after: torch.Tensor | None, stream: int) -> torch.Tensor:
        room = 0 if after is None else after.data_ptr()
        key = stream, room, operands
        known = self._tables.get(key)
        if known is None:
            if len(self._tables) >= _MOST_TABLES:
                self._tables.clear()
            packed = self._packed(operands, room)
            known = torch.frombuffer(packed, dtype=torch.uint8).to(self._device, non_blocking=True, copy=True)
            self._tables[key] = known
        return known

    def _packed(self, operands: Operands, room: int) -> bytearray:
        """The table of matrices; `room` is for what is lost of them, one after the other."""
        packed, at = bytearray(), 0
        for number, ((gradient, before, start, fresh), (rows, columns)) in enumerate(zip(zip(*operands), self._shapes)):
            after = room + 4 * at if room else 0
            at += rows * columns
            packed += _MATRIX.pack(
                gradient, before, after, start, fresh, *self._offsets[number], rows, columns,
                columns % 4 == 0 and all(address % 16 == 0 for address in (gradient, before, after)),
                self._chunks[number], self._first_grams[number], -(-rows // _GRAM_ROWS),
            )  # fmt: skip
        return packed


class _Bound:
    """The launches of a plan by one thread on one stream."""

    def __init__(self, kernels: Sequence[_Kernel], on: Launcher, stream: int) -> None:
        self._kernels = kernels
        self._arguments: list[ctypes.Array[ctypes.c_char]] = []
        self._starts: list[Callable[[], None]] = []
        for kernel in kernels:
            _load(on, kernel.name, kernel.threads, _LEAST if kernel.threads == 256 else 1)
            arguments = ctypes.create_string_buffer(launch.ARGS_BYTES)
            self._arguments.append(arguments)
            self._starts.append(on.bind(kernel.name, arguments, kernel.groups, kernel.threads, stream))

    def prepare(self, head: bytes) -> None:
        for kernel, arguments in zip(self._kernels, self._arguments):
            ctypes.memmove(arguments, head, len(head))
            _TILES.pack_into(arguments, _TILES_AT, 0 if kernel.tiles is None else kernel.tiles.data_ptr())
            _TURN.pack_into(arguments, _TURN_AT, kernel.turn)

    def launch(self, first: int, end: int) -> None:
        for start in self._starts[first:end]:
            start()
