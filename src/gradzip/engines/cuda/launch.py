"""What the kernels get: tensors and numbers packed as the structures of kernels/common.cuh, and scratch memory."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from ...errors import Unsupported
from ..layout import BLOCK, FIXED, FLOATS, NEAR, PAPER, SEGMENT, Floor, Job
from . import driver, wait
from .workspace import MOST_SMALL, MOST_TENSORS, Prepared, Workspace

WARPS = 4  # blocks that a group of threads decodes together
FEW_WARPS = 2  # of a group of encode_fixed where all blocks run at once: small groups spread better
FIXED_ROOM = 256 * 4 + 1728  # bytes of shared memory per warp of encode_fixed, besides the block itself
LANE_ROOM = 256 * 4 + 2048  # bytes of shared memory of encode_lanes
LANE_GROUPS = 32  # of encode_lanes per multiprocessor, as many as it takes
SMALL_BLOCKS = 512  # up to so many blocks a group of threads encodes each...
SMALL_ENCODERS = 4  # ...with so many groups per multiprocessor
SMALL_DECODED_BLOCKS = 4096  # up to so many blocks (codings 1 and 2: half) such a group decodes several...
SMALL_DECODED = 4  # ...these, with two warps for each
SMALL_DECODERS = 3  # such groups per multiprocessor, for 25 MiB at once
SMALL_THREADS = 256
FIXED_CELLS = 2 * BLOCK  # bytes of shared memory per block of small_decode
LANE_CELLS = 4 * BLOCK
SMALL_ROOM = 4096  # and what else it takes, at the most
SEGMENT_BLOCKS = SEGMENT // BLOCK
SMALL_GROUPS = 2048  # blocks or groups of them that may be fetched to the L2 cache as a whole
MOST_PREPARED = 512  # launches that are kept for the next time
CODE_STRIDE = 260
SLOT_BYTES = 32768
TABLE_THREADS = 256

_ARGS = struct.Struct("<8Q13i3I")
_LAUNCH, _LAUNCH_AT = struct.Struct("<2I"), 8 * 8 + 13 * 4  # the fields of Args that change with every small launch
_COUNTS, _COUNTS_AT = struct.Struct("<Q"), 7 * 8  # the field of Args that asks for histograms
_TOLD, _TOLD_AT = struct.Struct("<Q"), 5 * 8  # the field of Args with the address of what the host is told
TENSOR = np.dtype(  # Tensor of common.cuh
    [(name, "<u8") for name in ("values", "addend", "floors", "second", "body", "lengths", "tables")]
    + [(name, "<u8") for name in ("numel", "body_bytes")]
    + [(name, "<i4") for name in ("c0", "c1", "c2", "first_group", "first_segment", "_")]
)
_STEP = struct.Struct("<I")
ARGS_BYTES = _ARGS.size + MOST_TENSORS * TENSOR.itemsize
_TYPES = {torch.float32: "Float32", torch.bfloat16: "BFloat16", torch.float16: "Float16"}
_CODINGS = {FIXED: "kFixed", NEAR: "kNear", PAPER: "kPaper"}


class Launcher(Protocol):
    """A device that kernels run on."""

    def __hash__(self) -> int: ...

    def bind(
        self,
        kernel: str,
        arguments: ctypes.Array[ctypes.c_char],
        groups: int,
        threads: int,
        stream: int,
        follows: bool = False,
    ) -> Callable[[], None]:
        """What launches a loaded kernel, from one thread; `arguments` are copied whenever it is called.

        `follows`: another launch comes right before it, so that the thread is known to have the GPU's context.
        """
        ...

    def load(self, kernel: str, threads: int, shared: int, least: int = 1) -> int:
        """Makes a kernel ready that takes `shared` bytes of dynamic shared memory; how many groups run at once.

        The compiler sees to it that registers suffice for `least` groups per multiprocessor.
        """
        ...

    def fits(self, shared: int) -> bool:
        """Whether a group can have so many bytes of shared memory."""
        ...

    def warps(self, shared: int) -> int:
        """The number of warps per group that makes the most of the GPU, if each needs `shared` bytes."""
        ...

    def stream(self) -> int: ...

    def wait(self, stream: int) -> None: ...


emulator: Launcher | None = None  # what runs kernels on CPU tensors; the tests set it
_gpus: dict[torch.device, Launcher] = {}


def launcher(device: torch.device) -> Launcher:
    if device.type == "cuda":
        if device not in _gpus:
            _gpus[device] = driver.Device(device)
        return _gpus[device]
    if emulator is None:
        raise Unsupported(f"the cuda engine codes tensors on a GPU, not on {device}")
    return emulator


class _OfThread(threading.local):
    """Each thread has its own: torch hands out a pool of streams in turn, so that two threads may come to share one."""

    def __init__(self) -> None:
        self.workspaces: dict[tuple[torch.device, int], Workspace] = {}


_of_thread = _OfThread()
_abandoned: list[Workspace] = []  # kernels may still write there


def workspace(device: torch.device, stream: int) -> Workspace:
    space = _of_thread.workspaces.get((device, stream))
    if space is None:
        space = _of_thread.workspaces[device, stream] = Workspace(device)
    return space


def _take_tickets(space: Workspace, encodes: bool, groups: int, start: Callable[[], None]) -> None:
    """Launches a kernel whose groups take tickets. After an interrupt nobody knows whether it has."""
    try:
        start()
        space.served[encodes] = (space.served[encodes] + groups) & 0xFFFFFFFF
    except BaseException:
        _abandoned.append(space)
        _of_thread.workspaces.clear()
        raise


# --- Arguments ---------------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """One tensor of a launch, flat; what is None does not take part."""

    values: torch.Tensor
    body: torch.Tensor | None = None
    body_bytes: int = 0
    floor: torch.Tensor | Floor | None = None
    lengths: torch.Tensor | None = None
    tables: torch.Tensor | None = None  # a body whose code tables are used
    addend: torch.Tensor | None = None


def floor_kind(floor: torch.Tensor | Floor | None) -> str:
    if floor is None:
        return "kNoFloor"
    if isinstance(floor, torch.Tensor):
        return "kInt8Floor"
    return "kThetaFloor" if floor.second is None else "kSecondFloor"


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


Rows = npt.NDArray[np.void]  # of TENSOR


class Batch(NamedTuple):
    """Tensors that are launched together; `rows` without what follows from the kernel that takes them."""

    device: torch.device
    dtype: torch.dtype
    floor: str  # what kind of floor they have
    adds: bool
    rows: Rows


def as_batch(parts: Sequence[Part]) -> Batch:
    first = parts[0]
    rows = np.array([_row(part) for part in parts], TENSOR)
    return Batch(first.values.device, first.values.dtype, floor_kind(first.floor), first.addend is not None, rows)


def _row(part: Part) -> tuple[int, ...]:
    floors, second, c0, c1, c2 = None, None, 0, 0, 0
    if isinstance(part.floor, Floor):
        floors, second, c0, c1, c2 = part.floor.theta, part.floor.second, part.floor.c0, part.floor.c1, part.floor.c2
    elif part.floor is not None:
        floors = part.floor
    return (
        part.values.data_ptr(), _address(part.addend), _address(floors), _address(second), _address(part.body),
        _address(part.lengths), _address(part.tables), part.values.numel(), part.body_bytes, c0, c1, c2, 0, 0, 0,
    )  # fmt: skip


def batches(parts: Sequence[Part]) -> Iterator[Sequence[Part]]:
    """Parts that are launched together: of one type and kind of floor, and not too many."""
    kinds = [(part.values.dtype, floor_kind(part.floor), part.addend is None) for part in parts]
    start = 0
    for end in range(1, len(parts) + 1):
        if end == len(parts) or end - start == MOST_TENSORS or kinds[start] != kinds[end]:
            yield parts[start:end]
            start = end


@cache
def rounding(keep: int, truncate: bool) -> tuple[int, int, int, int]:
    """cut, up, odd and mask of map_keep: v becomes (v + up + (v >> cut & odd)) & mask."""
    cut = 23 - keep
    if cut == 0:
        return 0, 0, 0, -1
    if truncate:
        return cut, 0, 0, -(1 << cut)
    half = 1 << (cut - 1)
    # Ties to even; with no bit kept, to the implicit 1, which is odd.
    return (cut, half - 1, 1, -(1 << cut)) if cut < 23 else (cut, half, 0, -(1 << cut))


@dataclass(frozen=True)
class _Kernel:
    """A kernel as it is launched for one kind of tensors."""

    name: str
    warps: int  # per group; or blocks
    resident: int  # groups that run at once


@cache
def _plan_kernel(on: Launcher, dtype: torch.dtype, coding: int, floor: str, keeps: bool) -> str:
    name = f"plan_segment<{_TYPES[dtype]}, {_CODINGS[coding]}, {floor}, {str(keeps).lower()}>"
    on.load(name, TABLE_THREADS, 0)
    return name


@cache
def _encode_kernel(
    on: Launcher, dtype: torch.dtype, coding: int, floor: str, keep: int | None, truncate: bool, few: bool
) -> _Kernel:
    if coding != FIXED:
        name = f"encode_lanes<{_CODINGS[coding]}, {floor}>"
        return _Kernel(name, 1, on.load(name, 32, LANE_ROOM, LANE_GROUPS))
    halves = keep is not None and keep <= 7  # what is left of values fits into 16 bits
    stored = torch.bfloat16 if halves else dtype
    room = BLOCK * FLOATS[stored].item_bytes + FIXED_ROOM
    warps = FEW_WARPS if few else on.warps(room)
    rounding = "kAsIs" if keep is None else "kToBFloat16" if keep == 7 and not truncate else "kRounded"
    name = f"encode_fixed<{_TYPES[dtype]}, {_TYPES[stored]}, {rounding}, {warps}>"
    return _Kernel(name, warps, on.load(name, 32 * warps, warps * room))


@cache
def _decode_kernel(on: Launcher, dtype: torch.dtype, coding: int, floor: str, adds: bool) -> _Kernel:
    on.load("read_segment", TABLE_THREADS, 0)
    name = f"decode_blocks<{_TYPES[dtype]}, {_CODINGS[coding]}, {floor}, {str(adds).lower()}, {WARPS}>"
    return _Kernel(name, WARPS, on.load(name, 32 * WARPS, 0))


@cache
def _small_kernel(
    on: Launcher, dtype: torch.dtype, coding: int, floor: str, keep: int | None, truncate: bool
) -> _Kernel:
    if coding != FIXED:
        name = f"small_lanes<{_CODINGS[coding]}, {floor}>"
    else:
        stored = torch.bfloat16 if keep is not None and keep <= 7 else dtype
        name = f"small_fixed<{_TYPES[dtype]}, {_TYPES[stored]}, {'kAsIs' if keep is None else 'kRounded'}>"
    return _Kernel(name, 1, on.load(name, SMALL_THREADS, 0, SMALL_ENCODERS))


@cache
def _small_decoder(on: Launcher, dtype: torch.dtype, coding: int, floor: str, adds: bool) -> _Kernel:
    cells, blocks = FIXED_CELLS if coding == FIXED else LANE_CELLS, SMALL_DECODED
    while blocks > 1 and not on.fits(blocks * (cells + SMALL_ROOM)):
        blocks //= 2
    name = f"small_decode<{_TYPES[dtype]}, {_CODINGS[coding]}, {floor}, {str(adds).lower()}, {blocks}>"
    return _Kernel(name, blocks, on.load(name, SMALL_THREADS, blocks * cells, SMALL_DECODERS))


Key = tuple[object, ...]  # all that a launch, and what is checked before it, depends on


def recall(device: torch.device, key: Key) -> Prepared | None:
    """A launch on the current stream that was prepared under that key."""
    on = _gpus.get(device) or launcher(device)
    space = _of_thread.workspaces.get((device, on.stream()))
    return None if space is None else space.prepared.get(key)


def prepare(parts: Sequence[Part], coding: int, job: Job, encodes: bool, key: Key | None = None) -> Prepared:
    """A launch for these tensors; training uses the same buffers in every step, so that most are known already.

    It can be recalled under `key`; by default, under one made of all of its arguments.
    """
    device = parts[0].values.device
    on = _gpus.get(device) or launcher(device)
    stream = on.stream()
    space = _of_thread.workspaces.get((device, stream)) or workspace(device, stream)
    key = key or (coding, job, encodes, *map(_part_identity, parts))
    known = space.prepared.get(key)
    if known is None:
        known = make(as_batch(parts), coding, job, encodes, on, stream, space)
        remember(space, key, known)
    return known


def make(
    batch: Batch, coding: int, job: Job, encodes: bool, on: Launcher, stream: int, space: Workspace
) -> Launch | SmallLaunch:
    """A launch of the family that suits as many values."""
    most = min(SMALL_BLOCKS, MOST_SMALL) if encodes else SMALL_DECODED_BLOCKS // (1 if coding == FIXED else 2)
    small = int(-(-batch.rows["numel"].astype(np.int64) // BLOCK).sum()) <= most
    return (SmallLaunch if small else Launch)(batch, coding, job, encodes, on, stream, space)


def remember(space: Workspace, key: Key, made: Prepared) -> None:
    if len(space.prepared) >= MOST_PREPARED:
        space.prepared.clear()
    space.prepared[key] = made


def count_symbols(parts: Sequence[Part], coding: int, job: Job, counts: torch.Tensor) -> None:
    """Histograms alone, into (segments, 256) int32."""
    device = parts[0].values.device
    on = launcher(device)
    stream = on.stream()
    Launch(as_batch(parts), coding, job, True, on, stream, workspace(device, stream)).count_symbols(counts)


def identity(
    values: torch.Tensor, body: torch.Tensor | None, floor: torch.Tensor | Floor | None, lengths: torch.Tensor | None
) -> Key:
    """A tensor's part of a key. Asked for in every call, so that it calls no other function for an address."""
    grid: object = None
    if isinstance(floor, Floor):
        second = floor.second
        grid = floor.theta.data_ptr(), second is not None and second.data_ptr(), floor.c0, floor.c1, floor.c2
    elif floor is not None:
        grid = floor.data_ptr()
    return (
        values.data_ptr(), values.numel(), values.dtype, grid,
        None if body is None else (body.data_ptr(), body.numel()),
        None if lengths is None else (lengths.data_ptr(), lengths.is_contiguous()),
    )  # fmt: skip


def _part_identity(part: Part) -> Key:
    values, body, body_bytes, floor, lengths, tables, addend = part
    return *identity(values, body, floor, lengths), body_bytes, _address(tables), _address(addend)


class _Places(NamedTuple):
    """Where tensors begin among all groups of threads, or blocks, and segments of a launch."""

    first_group: npt.NDArray[np.int64]
    first_segment: npt.NDArray[np.int64]
    groups: int
    segments: int

    def fill(self, arguments: ctypes.Array[ctypes.c_char], rows: Rows) -> None:
        """Puts tensors into a launch's arguments."""
        rows["first_group"], rows["first_segment"] = self.first_group, self.first_segment
        packed = rows.tobytes()
        ctypes.memmove(ctypes.addressof(arguments) + _ARGS.size, packed, len(packed))


def _places(groups: npt.NDArray[np.int64], segments: npt.NDArray[np.int64]) -> _Places:
    groups_until, segments_until = groups.cumsum(), segments.cumsum()
    return _Places(groups_until - groups, segments_until - segments, int(groups_until[-1]), int(segments_until[-1]))


class Launch:
    """One batch on its way through the kernels."""

    all_or_nothing = True

    def __init__(
        self,
        batch: Batch,
        coding: int,
        job: Job,
        encodes: bool,
        on: Launcher,
        stream: int,
        space: Workspace,
    ) -> None:
        _, dtype, kind_of_floor, adds, rows = batch
        self._on, self._stream, self._space, self._encodes, self._count = on, stream, space, encodes, len(rows)
        floor = "kNoFloor" if coding == FIXED else kind_of_floor
        blocks = -(-rows["numel"].astype(np.int64) // BLOCK)
        segments = -(-blocks // SEGMENT_BLOCKS)
        if encodes:
            keep = job.keep if job.mode == "keep" and dtype == torch.float32 else None
            self._tables = _plan_kernel(on, dtype, coding, floor, keep is not None)
            kind = on, dtype, coding, floor, keep, job.truncate
            self._main = _encode_kernel(*kind, few=True)
            if blocks.sum() > self._main.warps * self._main.resident:
                self._main = _encode_kernel(*kind, few=False)
        else:
            self._tables = "read_segment"
            self._main = _decode_kernel(on, dtype, coding, floor, adds)
        warps = self._main.warps
        # The encoder's warps take single blocks, the decoder's groups of them.
        self._places = _places(blocks if encodes else -(-blocks // warps), segments)
        groups, all_segments = self._places.groups, self._places.segments
        self._running = min(-(-groups // warps) if encodes else groups, self._main.resident)
        slots = 0 if coding == FIXED else self._running * warps * SLOT_BYTES
        progress = slots + 4 * CODE_STRIDE * all_segments
        words = progress + 8 * groups
        memory = self._space.memory(words + 4 * all_segments)
        ticket, status, told = self._space.addresses
        book = job.book - (job.book >> 31 << 32)  # signed
        head = _ARGS.pack(
            memory + slots, memory + progress, ticket, memory, status, told, memory + words, 0,
            self._count, groups, all_segments, coding, book, job.shift, job.limit, groups <= SMALL_GROUPS,
            job.keep, *rounding(job.keep, job.truncate), 0, 0, 0,
        )  # fmt: skip
        self._arguments = ctypes.create_string_buffer(head, ARGS_BYTES)
        self._places.fill(self._arguments, rows)
        self._make_tables = on.bind(self._tables, self._arguments, all_segments, TABLE_THREADS, stream)
        self._code_blocks = on.bind(self._main.name, self._arguments, self._running, 32 * warps, stream)

    def count_symbols(self, counts: torch.Tensor) -> None:
        """Histograms alone, into (segments, 256) int32."""
        _COUNTS.pack_into(self._arguments, _COUNTS_AT, counts.data_ptr())
        self._make_tables()
        _COUNTS.pack_into(self._arguments, _COUNTS_AT, 0)

    def refill(self, rows: Rows, told: int) -> None:
        """Other tensors of the same sizes, for the next run; `told`: the address of what the host is told of them."""
        self._places.fill(self._arguments, rows)
        _TOLD.pack_into(self._arguments, _TOLD_AT, told)

    def run(self) -> None:
        """Code tables, then blocks."""
        self._make_tables()
        _LAUNCH.pack_into(self._arguments, _LAUNCH_AT, self._space.next_epoch(), 0)
        self._code_blocks()

    def finish(self) -> tuple[list[int], int]:
        """Waits for the kernels; the sizes of the encoded bodies, and the status word, which is cleared."""
        if self._encodes:
            return wait.for_sizes(self._on, self._stream, self._space, self._count)
        return [], wait.for_status(self._on, self._stream, self._space)


class SmallLaunch:
    """One batch in one kernel, a group of threads working on each block: see kernels/small.cuh."""

    all_or_nothing = False

    def __init__(
        self,
        batch: Batch,
        coding: int,
        job: Job,
        encodes: bool,
        on: Launcher,
        stream: int,
        space: Workspace,
    ) -> None:
        _, dtype, kind_of_floor, adds, rows = batch
        self._on, self._stream, self._space, self._encodes, self._count = on, stream, space, encodes, len(rows)
        floor = "kNoFloor" if coding == FIXED else kind_of_floor
        blocks = -(-rows["numel"].astype(np.int64) // BLOCK)
        segments = -(-blocks // SEGMENT_BLOCKS)
        if encodes:
            keep = job.keep if job.mode == "keep" and dtype == torch.float32 else None
            self._kernel = _small_kernel(on, dtype, coding, floor, keep, job.truncate)
        else:
            self._kernel = _small_decoder(on, dtype, coding, floor, adds)
        together = self._kernel.warps
        self._places = _places(-(-blocks // together), segments)
        groups = self._groups = self._places.groups
        memory = self._space.memory(groups * together * SLOT_BYTES if coding != FIXED else 0)
        progress, counters = self._space.small_addresses
        _, status, told = self._space.addresses
        book = job.book - (job.book >> 31 << 32)  # signed
        head = _ARGS.pack(
            0, progress, counters + 8 * self._encodes, memory, status, told, 0, 0,
            self._count, groups, self._places.segments, coding, book, job.shift, job.limit, 1,
            job.keep, *rounding(job.keep, job.truncate), 0, 0, 0,
        )  # fmt: skip
        self._arguments = ctypes.create_string_buffer(head, ARGS_BYTES)
        self._places.fill(self._arguments, rows)
        self._start = self._on.bind(self._kernel.name, self._arguments, groups, SMALL_THREADS, self._stream)

    def refill(self, rows: Rows, told: int) -> None:
        """Other tensors of the same sizes, for the next run; `told`: the address of what the host is told of them."""
        self._places.fill(self._arguments, rows)
        _TOLD.pack_into(self._arguments, _TOLD_AT, told)

    def run(self) -> None:
        space = self._space
        _LAUNCH.pack_into(self._arguments, _LAUNCH_AT, space.next_epoch(), space.served[self._encodes])
        _take_tickets(space, self._encodes, self._groups, self._start)

    def finish(self) -> tuple[list[int], int]:
        """Waits for the kernel; the sizes of the encoded bodies, and the status word, which is cleared."""
        if self._encodes:
            return wait.for_sizes(self._on, self._stream, self._space, self._count)
        return [], wait.for_status(self._on, self._stream, self._space)


# --- Kernels of one tensor that are not GComp ----------------------------------------------------------------------


@cache
def ready(on: Launcher, kernel: str, threads: int) -> None:
    on.load(kernel, threads, 0)


def describe(
    part: Part, space: Workspace, groups: int, *, limit: int = 0, keep: int = 0
) -> ctypes.Array[ctypes.c_char]:
    """Arguments of a kernel that works on one tensor; what the numbers mean is up to it."""
    progress, counters = space.small_addresses
    _, status, told = space.addresses
    head = _ARGS.pack(
        0, progress, counters + 8, 0, status, told, 0, 0, 1, groups, 0, 0, 0, 0, limit, 1, keep, 0, 0, 0, 0, 0, 0, 0
    )
    return ctypes.create_string_buffer(head + as_batch([part]).rows.tobytes(), ARGS_BYTES)


def run_ordered(
    kernel: str, arguments: ctypes.Array[ctypes.c_char], groups: int, on: Launcher, stream: int, space: Workspace
) -> int:
    """Runs a kernel whose groups announce numbers to each other, and waits; the sum that the last one found."""
    ready(on, kernel, SMALL_THREADS)
    _LAUNCH.pack_into(arguments, _LAUNCH_AT, space.next_epoch(), space.served[1])
    _take_tickets(space, True, groups, on.bind(kernel, arguments, groups, SMALL_THREADS, stream))
    (found,), _ = wait.for_sizes(on, stream, space, 1)
    return found


# --- Kernels that take a step's number ---------------------------------------------------------------------------


class StepCall:
    """A kernel with its arguments, launched any number of times on the current stream."""

    def __init__(
        self, device: torch.device, kernel: str, groups: int, threads: int, packed: bytes, step_at: int, least: int = 1
    ) -> None:
        """`packed`: the kernel's structure, in which the step's number is the u32 at byte `step_at`."""
        self._on = launcher(device)
        self._kernel, self._threads, self._groups, self._step_at = kernel, threads, groups, step_at
        self.resident = load_once(self._on, kernel, threads, least)
        self._arguments = ctypes.create_string_buffer(packed, ARGS_BYTES)
        self._bound: dict[int, Callable[[], None]] = {}

    def __call__(self, step: int) -> None:
        if self._groups == 0:
            return
        stream = self._on.stream()
        start = self._bound.get(stream)
        if start is None:
            start = self._bound[stream] = self._on.bind(
                self._kernel, self._arguments, self._groups, self._threads, stream
            )
        _STEP.pack_into(self._arguments, self._step_at, step & 0xFFFFFFFF)
        start()


class Stage:
    """Calls that are launched one behind the other, with one look at the stream and little Python."""

    def __init__(self, calls: Sequence[StepCall]) -> None:
        self.calls = [call for call in calls if call._groups]
        self._on = self.calls[0]._on if self.calls else None
        self._starts: dict[int, list[Callable[[], None]]] = {}  # by stream

    def __call__(self, step: int) -> None:
        if self._on is None:
            return
        stream = self._on.stream()
        starts = self._starts.get(stream)
        if starts is None:
            starts = self._starts[stream] = [
                call._on.bind(call._kernel, call._arguments, call._groups, call._threads, stream, number > 0)
                for number, call in enumerate(self.calls)
            ]
        for call in self.calls:
            _STEP.pack_into(call._arguments, call._step_at, step & 0xFFFFFFFF)
        for start in starts:
            start()


@cache
def load_once(on: Launcher, kernel: str, threads: int, least: int) -> int:
    """How many groups run at once of a kernel without dynamic shared memory."""
    return on.load(kernel, threads, 0, least)
