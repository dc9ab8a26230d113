"""What the kernels get: tensors and numbers packed as the structures of kernels/common.cuh, and scratch memory."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch

from ...errors import Unsupported
from ..layout import FIXED, NEAR, PAPER, Floor, Job, blocks_of, float_layout, segments_of
from . import driver

WARPS = 4  # blocks that a group of threads codes together
MOST_TENSORS = 16  # per launch
CODE_STRIDE = 260
SLOT_BYTES = 32768
TABLE_THREADS = 256

_ARGS = struct.Struct("<8Q14i")
_TENSOR = struct.Struct("<9Q3i3I")
_TYPES = {torch.float32: "Float32", torch.bfloat16: "BFloat16", torch.float16: "Float16"}
_CODINGS = {FIXED: "kFixed", NEAR: "kNear", PAPER: "kPaper"}


class Launcher(Protocol):
    """A device that kernels run on."""

    def launch(self, kernel: str, arguments: bytes, groups: int, threads: int) -> None: ...

    def resident(self, kernel: str, threads: int) -> int: ...

    def stream(self) -> int: ...

    def wait(self) -> None: ...


emulator: Launcher | None = None  # what runs kernels on CPU tensors; the tests set it


@cache
def _gpu(device: torch.device) -> Launcher:
    return driver.Device(device)


def launcher(device: torch.device) -> Launcher:
    if device.type == "cuda":
        return _gpu(device)
    if emulator is None:
        raise Unsupported(f"the cuda engine codes tensors on a GPU, not on {device}")
    return emulator


# --- Scratch memory ----------------------------------------------------------------------------------------------


class Workspace:
    """Scratch memory of one stream, kept between calls and grown as needed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[str, torch.Tensor] = {}
        self.status = torch.zeros(1, dtype=torch.int32, device=device)
        self.ticket = torch.zeros(1, dtype=torch.int32, device=device)
        # Kernels write sizes and status straight into host memory.
        self.result = torch.zeros(MOST_TENSORS + 1, dtype=torch.int64, pin_memory=device.type == "cuda")

    def get(self, name: str, size: int) -> int:
        """The address of at least `size` bytes."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[name] = torch.empty(max(size, 1), dtype=torch.uint8, device=self._device)
        return buffer.data_ptr()


@cache
def _workspace(device: torch.device, stream: int) -> Workspace:
    return Workspace(device)


def workspace(device: torch.device) -> Workspace:
    return _workspace(device, launcher(device).stream())


# --- Arguments ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
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


def _pack(part: Part, first_group: int, first_segment: int) -> bytes:
    floors, second, c0, c1, c2 = None, None, 0, 0, 0
    if isinstance(part.floor, Floor):
        floors, second, c0, c1, c2 = part.floor.theta, part.floor.second, part.floor.c0, part.floor.c1, part.floor.c2
    elif part.floor is not None:
        floors = part.floor
    return _TENSOR.pack(
        part.values.data_ptr(), _address(part.addend), _address(floors), _address(second), _address(part.body),
        _address(part.lengths), _address(part.tables), part.values.numel(), part.body_bytes,
        c0, c1, c2, first_group, first_segment, 0,
    )  # fmt: skip


def batches(parts: Sequence[Part]) -> Iterator[Sequence[Part]]:
    """Parts that are launched together: of one type and kind of floor, and not too many."""
    start = 0
    for end in range(1, len(parts) + 1):
        full = end - start == MOST_TENSORS
        if end == len(parts) or full or _alike(parts[start]) != _alike(parts[end]):
            yield parts[start:end]
            start = end


def _alike(part: Part) -> tuple[object, ...]:
    return part.values.dtype, floor_kind(part.floor), part.addend is None


def _rounding(job: Job) -> tuple[int, int, int, int]:
    """cut, up, odd and mask of map_keep: v becomes (v + up + (v >> cut & odd)) & mask."""
    cut = 23 - job.keep
    if cut == 0:
        return 0, 0, 0, -1
    if job.truncate:
        return cut, 0, 0, -(1 << cut)
    half = 1 << (cut - 1)
    # Ties to even; with no bit kept, to the implicit 1, which is odd.
    return (cut, half - 1, 1, -(1 << cut)) if cut < 23 else (cut, half, 0, -(1 << cut))


class Launch:
    """One batch on its way through the kernels."""

    def __init__(self, parts: Sequence[Part], coding: int, job: Job) -> None:
        self.device = parts[0].values.device
        self.space = workspace(self.device)
        self._launcher = launcher(self.device)
        self._parts, self._coding, self._job = parts, coding, job
        self.groups = self.segments = 0
        packed = []
        for part in parts:
            packed.append(_pack(part, self.groups, self.segments))
            self.groups += -(-blocks_of(part.values.numel()) // WARPS)
            self.segments += segments_of(part.values.numel())
        self._tensors = b"".join(packed).ljust(MOST_TENSORS * _TENSOR.size, b"\0")

    @property
    def type(self) -> str:
        return _TYPES[self._parts[0].values.dtype]

    @property
    def _where(self) -> str:
        """Coding and kind of floor, as template arguments."""
        kind = "kNoFloor" if self._coding == FIXED else floor_kind(self._parts[0].floor)
        return f"{_CODINGS[self._coding]}, {kind}"

    @property
    def _keeps(self) -> str:
        return "true" if self._job.mode == "keep" and self._parts[0].values.dtype == torch.float32 else "false"

    def _arguments(self, slots: int, counts: int = 0) -> bytes:
        space, job = self.space, self._job
        signed_book = job.book - (1 << 32) if job.book >= 1 << 31 else job.book
        head = _ARGS.pack(
            space.get("codes", 4 * CODE_STRIDE * self.segments), space.get("progress", 8 * self.groups),
            space.ticket.data_ptr(), space.get("slots", slots * SLOT_BYTES), space.status.data_ptr(),
            space.result.data_ptr(), space.get("words", 4 * self.segments), counts,
            len(self._parts), self.groups, self.segments, self._coding, signed_book, job.shift, job.limit, 0,
            job.keep, *_rounding(job), 0,
        )  # fmt: skip
        return head + self._tensors

    def _run(self, kernel: str, groups: int, threads: int, slots: int = 0, counts: int = 0) -> None:
        if groups:
            self._launcher.launch(kernel, self._arguments(slots, counts), groups, threads)

    def plan(self, counts: torch.Tensor | None = None) -> None:
        """Code tables for the encoder, or histograms alone."""
        kernel = f"plan_segment<{self.type}, {self._where}, {self._keeps}>"
        self._run(kernel, self.segments, TABLE_THREADS, counts=_address(counts))

    def encode(self) -> None:
        if self._coding == FIXED:
            kernel = f"encode_fixed<{self.type}, {self._keeps}, {WARPS}>"
        else:
            kernel = f"encode_lanes<{self._where}, {WARPS}>"
        groups = min(self.groups, self._launcher.resident(kernel, 32 * WARPS))
        self._run(kernel, groups, 32 * WARPS, slots=0 if self._coding == FIXED else groups * WARPS)

    def read_tables(self) -> None:
        self._run("read_segment", self.segments, TABLE_THREADS)

    def decode(self) -> None:
        add = "true" if self._parts[0].addend is not None else "false"
        kernel = f"decode_blocks<{self.type}, {self._where}, {add}, {WARPS}>"
        groups = min(self.groups, self._launcher.resident(kernel, 32 * WARPS))
        self._run(kernel, groups, 32 * WARPS, slots=groups * WARPS if self._coding == NEAR else 0)

    def finish(self) -> tuple[list[int], int]:
        """Waits for the stream; the sizes of the encoded bodies, and the status word, which is cleared."""
        self._launcher.wait()
        *sizes, status = self.space.result.tolist()
        if status:
            self.space.status.zero_()
        return sizes[: len(self._parts)], status


def check_type(tensor: torch.Tensor) -> None:
    float_layout(tensor.dtype)
