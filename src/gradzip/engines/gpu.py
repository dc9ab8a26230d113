"""The GComp body on a GPU, in Triton: launches the kernels of the modules gpu_*.

Same bytes as the reference engine. `encode` synchronises once, to learn the size (and once before it where it has
to find code lengths); `decode` once, to learn whether the payload was sound. CUDA tensors, or CPU tensors under
TRITON_INTERPRET=1.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache

import torch

from ..errors import Corrupt, EngineError, Truncated, Unsupported
from . import (
    gpu_decode,
    gpu_encode,
    gpu_lanes,
    gpu_mapping,
    gpu_measure,
    gpu_rows,
    gpu_sparse,
    gpu_statistics,
    gpu_tables,
)
from .gpu_lanes import INTERPRETED
from .gpu_tables import code_lengths as code_lengths  # part of the engine's interface
from .layout import (
    BODY_HEAD_BYTES,
    CODINGS,
    FIXED,
    NEAR,
    PAPER,
    Floor,
    Job,
    blocks_of,
    blocks_offset,
    float_layout,
    index_offset,
    segments_of,
)

NAME = "triton"

# Programs (warps) per multiprocessor: more hide latency better, as far as registers and caches suffice.
MEASURE_PROGRAMS = 24
MEASURE_REGISTERS = 128  # at the most, so that 16 programs fit
WRITE_PROGRAMS = 20
DECODE_PROGRAMS = 20
DECODE_AHEAD = 512  # how many blocks ahead of its own a program has input brought to the L2 cache
_FAULTS: list[tuple[int, type[Exception], str]] = [
    (gpu_tables.BAD_HEAD.value, Corrupt, "reserved or contradictory bits in the head of the gcomp body"),
    (gpu_tables.BAD_TABLE.value, Corrupt, "a code table is no complete code"),
    (gpu_tables.BAD_INDEX_PADDING.value, Corrupt, "the padding behind the block index is not zero"),
    (gpu_decode.SHORT_BODY.value, Truncated, "a block ends behind the end of the payload"),
    (gpu_decode.LONG_BODY.value, Corrupt, "bytes follow the last block"),
    (gpu_decode.BAD_KIND.value, Corrupt, "a block of a reserved kind"),
    (gpu_decode.BAD_RAW.value, Corrupt, "a raw block has the wrong size or padding"),
    (gpu_decode.SHORT_DENSE.value, Truncated, "a dense block ends inside its head"),
    (gpu_decode.BAD_DENSE_HEAD.value, Corrupt, "the head of a dense block contradicts itself or its length"),
    (
        gpu_decode.BAD_LANES.value,
        Corrupt,
        "the lanes of a dense block do not end where they began (near mode: or the floors differ from the encoder's)",
    ),
    (gpu_decode.BAD_FIELDS.value, Corrupt, "a dense block holds another number of values than its head says"),
    (gpu_decode.STRAY_SPARSE.value, Corrupt, "a sparse block in a frame that is not in near mode"),
    (
        gpu_sparse.BAD_SPARSE.value,
        Corrupt,
        "a sparse block contradicts itself (or the floors differ from the encoder's)",
    ),
]
_CODING_SHIFT = 24  # status bits above tell which coding the body has, if not the expected one


# --- Interface ---------------------------------------------------------------------------------------------------


def encode(
    x: torch.Tensor,
    job: Job,
    out: torch.Tensor,
    floor: torch.Tensor | Floor | None = None,
    lengths: torch.Tensor | None = None,
) -> int:
    """Writes the body of flat `x` into uint8 `out` and returns its length in bytes.

    `lengths`, (segments, 256) uint8, are the code lengths to use; by default the encoder samples `x`.
    """
    _check_device(x)
    if out.data_ptr() % 4:
        aligned = torch.empty(out.numel() + 3, dtype=torch.uint8, device=out.device)
        size = encode(x, job, aligned, floor, lengths)
        out[:size] = aligned[:size]
        return size
    source = _Source.of(x, job, floor)
    if x.numel() == 0:
        head = bytearray([source.coding, 1 if job.book else 0, 0, 0]) + job.book.to_bytes(4, "little")
        out[:BODY_HEAD_BYTES] = torch.frombuffer(head, dtype=torch.uint8)
        return BODY_HEAD_BYTES
    if lengths is None:
        lengths = code_lengths(histogram(x, job, floor), job.limit)
    lengths = lengths.to(x.device).contiguous()
    segments, n_blocks = segments_of(x.numel()), blocks_of(x.numel())
    index_at, blocks_at = index_offset(x.numel(), job.book), blocks_offset(x.numel(), job.book)
    book = job.book - (1 << 32) if job.book >= 1 << 31 else job.book
    with _on(x.device):
        space = _workspace(x.device)
        codes = space.get("codes", segments * gpu_tables.CODE_STRIDE.value, torch.int32)
        sums = space.get("sums", -(-n_blocks // gpu_lanes.GROUP.value), torch.int32)
        records = space.get("records", 2 * n_blocks, torch.int32)
        measurers = min(n_blocks, MEASURE_PROGRAMS * space.processors)
        writers = min(n_blocks, WRITE_PROGRAMS * space.processors)
        fixed = source.coding == FIXED
        per_measurer = gpu_measure.FIXED_SCRATCH.value if fixed else gpu_measure.LANES_SCRATCH.value
        per_writer = gpu_encode.FIXED_SCRATCH.value if fixed else gpu_encode.LANES_SCRATCH.value
        scratch = space.get("scratch", max(measurers * per_measurer, writers * per_writer), torch.uint8)
        gpu_tables.prepare_encode[(segments,)](
            lengths, codes, out, sums, space.status, source.coding, book, n_blocks, blocks_at, num_warps=1
        )
        gpu_measure.measure_blocks[(measurers,)](
            source.x, source.floor, source.second, codes, out, sums, records, scratch,
            x.numel(), n_blocks, index_at, *source.numbers, num_warps=1, maxnreg=MEASURE_REGISTERS, **source.constants,
        )  # fmt: skip
        gpu_encode.write_blocks[(writers,)](
            source.x, source.floor, source.second, codes, out, sums, records, space.status, space.result, scratch,
            x.numel(), n_blocks, index_at, blocks_at, *source.numbers, num_warps=1, **source.constants,
        )  # fmt: skip
        space.wait()
    size, status = space.result.tolist()
    space.raise_faults(status)
    return int(size)


def decode(
    body: torch.Tensor,
    out: torch.Tensor,
    floor: torch.Tensor | Floor | None = None,
    shift: int = 0,
    add: bool = False,
    book: torch.Tensor | None = None,
) -> None:
    """Reads a body into flat `out`, adding to what is there if `add`. `book`: (segments, 256) lengths of a shared book.

    If the payload proves to be corrupt, `out` has been written to in part.
    """
    _check_device(out)
    numel = out.numel()
    if body.numel() < BODY_HEAD_BYTES:
        raise Truncated("the gcomp body ends inside its head")
    if body.numel() < blocks_offset(numel, 0 if book is None else 1):
        raise Truncated("the gcomp body ends inside its tables")
    if body.data_ptr() % 4 or body.numel() % 4:
        padded = torch.zeros((body.numel() + 3) // 4 * 4, dtype=torch.uint8, device=body.device)
        padded[: body.numel()] = body
    else:
        padded = body
    expected = FIXED if floor is None else NEAR
    status = _launch_decode(padded, body.numel(), out, expected, floor, shift, add, book)
    actual = (status >> _CODING_SHIFT) - 1
    if status and status == (actual + 1) << _CODING_SHIFT:
        if actual == NEAR:
            raise Unsupported("decoding a frame in near mode needs floor=: gradzip.floors(optimizer) gives them")
        _launch_decode(padded, body.numel(), out, actual, None, shift, add, book)


def histogram(x: torch.Tensor, job: Job, floor: torch.Tensor | Floor | None = None) -> torch.Tensor:
    """Sampled symbol counts of each segment, (segments, 256) int64."""
    _check_device(x)
    source = _Source.of(x, job, floor)
    counts = torch.zeros(segments_of(x.numel()), 256, dtype=torch.int32, device=x.device)
    if x.numel():
        with _on(x.device):
            constants = {name: value for name, value in source.constants.items() if name != "CODING"}
            gpu_statistics.sample_symbols[(blocks_of(x.numel()),)](
                source.x, source.floor, source.second, counts, x.numel(), *source.numbers, num_warps=1, **constants
            )
    return counts.to(torch.int64)


# --- Launching ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Source:
    """A job's input, as the kernels take it: values, where floors come from, numbers and compile-time constants."""

    x: torch.Tensor
    floor: torch.Tensor
    second: torch.Tensor
    coding: int
    numbers: tuple[int, ...]
    constants: dict[str, int]

    @classmethod
    def of(cls, x: torch.Tensor, job: Job, floor: torch.Tensor | Floor | None) -> _Source:
        layout = float_layout(x.dtype)
        coding, mode = FIXED, gpu_mapping.LOSSLESS
        floors, second, floor_kind, c0, c1, c2 = x, x, gpu_mapping.NO_FLOOR.value, 0, 0, 0
        if x.dtype == torch.float32:
            coding = CODINGS[job.mode]
            mode = {
                "lossless": gpu_mapping.LOSSLESS,
                "keep": gpu_mapping.TRUNCATE if job.truncate else gpu_mapping.NEAREST,
                "near": gpu_mapping.NEAR_GRID,
                "paper": gpu_mapping.PAPER_LEVEL,
            }[job.mode]
        if coding != FIXED:
            if floor is None:
                raise Unsupported(f"gcomp in {job.mode} mode needs floor=")
            floors, second, floor_kind, c0, c1, c2 = _floor_arguments(floor, job.shift)
        constants = {
            "CODING": coding,
            "MODE": mode.value,
            "FLOOR": floor_kind,
            "ITEM": layout.item_bytes,
            "EXPONENT": layout.exponent_bits,
            "FIELD": layout.field_bits,
            "INTERPRET": INTERPRETED,
        }
        return cls(x, floors, second, coding, (c0, c1, c2, job.shift, job.keep, *_rounding(job)), constants)


def _rounding(job: Job) -> tuple[int, int, int, int]:
    """The arguments of map_keep_usual: v becomes (v + up + (v >> cut & odd)) & mask."""
    cut = 23 - job.keep
    if cut == 0:
        return 0, 0, 0, -1
    if job.truncate:
        return cut, 0, 0, -(1 << cut)
    half = 1 << (cut - 1)
    # Ties to even; with no bit kept, to the implicit 1, which is odd.
    return (cut, half - 1, 1, -(1 << cut)) if cut < 23 else (cut, half, 0, -(1 << cut))


def _floor_arguments(floor: torch.Tensor | Floor, shift: int) -> tuple[torch.Tensor, torch.Tensor, int, int, int, int]:
    if shift < 0:
        raise Unsupported(f"floors are shifted up, for sums of several ranks; not by {shift}")
    if isinstance(floor, torch.Tensor):
        return floor, floor, gpu_mapping.INT8_FLOOR.value, 0, 0, 0
    if floor.second is None:
        return floor.theta, floor.theta, gpu_mapping.THETA_FLOOR.value, floor.c0, 0, 0
    return floor.theta, floor.second, gpu_mapping.THETA_SECOND_FLOOR.value, floor.c0, floor.c1, floor.c2


def _launch_decode(
    body: torch.Tensor,
    body_bytes: int,
    out: torch.Tensor,
    coding: int,
    floor: torch.Tensor | Floor | None,
    shift: int,
    add: bool,
    book: torch.Tensor | None,
) -> int:
    """Decodes if the body has that coding; returns the status word, of which faults have been raised."""
    layout = float_layout(out.dtype)
    numel = out.numel()
    segments, n_blocks = segments_of(numel), blocks_of(numel)
    groups = -(-n_blocks // gpu_lanes.GROUP.value)
    shared = 0 if book is None else 1
    index_at, blocks_at = index_offset(numel, shared), blocks_offset(numel, shared)
    if coding == NEAR:
        assert floor is not None
        floors, second, floor_kind, c0, c1, c2 = _floor_arguments(floor, shift)
    else:
        floors, second, floor_kind, c0, c1, c2 = out, out, gpu_mapping.NO_FLOOR.value, 0, 0, 0
    sums_as = {
        torch.float32: gpu_rows.ADD_FLOAT32,
        torch.bfloat16: gpu_rows.ADD_BFLOAT16,
        torch.float16: gpu_rows.ADD_FLOAT16,
    }
    with _on(out.device):
        space = _workspace(out.device)
        lookup = space.get("lookup", segments * gpu_tables.LOOKUP_STRIDE.value, torch.int32)
        sums = space.get("sums", groups, torch.int32)
        programs = min(n_blocks, DECODE_PROGRAMS * space.processors)
        lists = gpu_decode.LIST_BYTES_PER_PROGRAM.value if coding == NEAR else 0
        scratch = space.get("scratch", programs * (gpu_decode.TABLE_BYTES_PER_PROGRAM.value + lists), torch.uint8)
        gpu_tables.prepare_decode[(max(1, segments, groups),)](
            body, body if book is None else book, lookup, sums, space.status,
            coding, n_blocks, index_at, blocks_at, segments, groups,
            SHARED=bool(shared), num_warps=1,
        )  # fmt: skip
        if n_blocks:
            gpu_decode.decode_blocks[(programs,)](
                body, lookup, sums, out, floors, second, space.status, scratch,
                body_bytes, numel, n_blocks, index_at, blocks_at, c0, c1, c2, shift, DECODE_AHEAD, 0,
                CODING=coding, FLOOR=floor_kind, ITEM=layout.item_bytes, EXPONENT=layout.exponent_bits,
                FIELD=layout.field_bits, ADD=sums_as[out.dtype].value if add else gpu_rows.STORE_BITS.value,
                INTERPRET=INTERPRETED, num_warps=1,
            )  # fmt: skip
        status = int(space.status.item())
    if not n_blocks and body_bytes != blocks_at:
        raise Corrupt(f"{body_bytes - blocks_at} bytes follow the last block")
    space.raise_faults(status & ((1 << _CODING_SHIFT) - 1))
    if status:
        space.status.zero_()
    return status


class _Workspace:
    """Scratch memory of one stream, kept between calls and grown as needed."""

    def __init__(self, device: torch.device):
        self.device = device
        self.buffers: dict[str, torch.Tensor] = {}
        self.status = torch.zeros(1, dtype=torch.int32, device=device)
        # The kernel writes size and status straight into host memory.
        self.result = torch.zeros(2, dtype=torch.int64, pin_memory=device.type == "cuda")
        on_gpu = device.type == "cuda"
        self.processors = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 1

    def get(self, name: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
        buffer = self.buffers.get(name)
        if buffer is None or buffer.numel() < numel:
            buffer = self.buffers[name] = torch.empty(max(numel, 1), dtype=dtype, device=self.device)
        return buffer

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def raise_faults(self, status: int) -> None:
        for bit, error, message in _FAULTS:
            if status & bit:
                self.status.zero_()
                raise error(message)


@cache
def _workspace_of(device: torch.device, stream: int) -> _Workspace:
    return _Workspace(device)


def _workspace(device: torch.device) -> _Workspace:
    return _workspace_of(device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0)


def _on(device: torch.device) -> AbstractContextManager[object]:
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def _check_device(x: torch.Tensor) -> None:
    if x.device.type != "cuda" and not INTERPRETED:
        where = f"CUDA tensors, not tensors on {x.device}"
        raise EngineError(f"the triton engine codes {where}: use the native engine there")


assert PAPER == 2 and NEAR == 1 and FIXED == 0  # the kernels write these as numbers

if not INTERPRETED:
    # Triton's key for a compiled kernel depends on which kernels it has looked at before. Looking at all of them here
    # lets every process find what another has compiled.
    for _kernel in (
        gpu_statistics.sample_symbols,
        gpu_tables.prepare_encode,
        gpu_measure.measure_blocks,
        gpu_encode.write_blocks,
        gpu_tables.prepare_decode,
        gpu_decode.decode_blocks,
    ):
        assert _kernel.cache_key
