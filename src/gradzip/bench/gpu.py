"""GComp on a GPU: sizes and speeds from messages of a megabyte to a gigabyte, beside a device copy and nvCOMP.

A sample is repeated to each size. Round trips are verified, then whole calls are timed with CUDA events: host launches
and the one wait are inside. Buffers are reused and code lengths given, as from the step before; inputs that would stay
in the L2 cache are rotated.
"""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType

import torch

from ..codecs import Codec, parse
from ..codecs.gcomp import GComp
from ..engines import cuda
from ..engines.layout import Floor, Job, body_bound
from ..errors import EngineError, Unsupported
from .codec import WrongRoundTrip
from .sample import Sample

MIB = 1 << 20
SIZES = (1, 4, 16, 64, 256, 1024)
DEFAULT_CODECS = "gcomp:mode=lossless;gcomp:keep=7;gcomp;gcomp:ulps=256;gcomp:ulps=65536;bf16"
BUCKET = 25 * MIB  # DDP's usual bucket, for the batched launches
_ROTATED = 256 * MIB  # several times the L2 cache


@dataclass(frozen=True)
class GpuResult:
    """One row of `gradzip bench codec --device cuda`. GB are 1e9 bytes of raw input."""

    codec: str
    mib: float
    chunks: int  # coded by one launch
    ratio: float
    encode_gbps: float
    decode_gbps: float
    copy_gbps: float  # a device copy of the same bytes, in the same run
    encode_floor: float  # share of the speed that memory traffic alone would allow
    decode_floor: float
    device: str


def measure(
    names: list[str], sample: Sample, sizes: tuple[int, ...] = SIZES, batches: bool = True
) -> Iterator[GpuResult]:
    """Rows for each codec and size, then those of a bucket coded as 1, 4 and 8 chunks, then nvCOMP's."""
    if not torch.cuda.is_available():
        raise EngineError("`--device cuda` measures on a GPU, and torch sees none")
    for mib in sizes:
        for name in names:
            yield _Case(name, sample, mib * MIB, 1).result()
    if batches:
        for chunks in (1, 4, 8):
            yield _Case(names[0], sample, BUCKET, chunks).result()
    for mib in sizes:
        yield from _nvcomp(sample, mib * MIB)


class _Case:
    def __init__(self, name: str, sample: Sample, raw_bytes: int, chunks: int) -> None:
        self.name, self.raw_bytes, self.chunks = name, raw_bytes, chunks
        dtype = torch.bfloat16 if name == "bf16" else torch.float32
        codec: Codec = GComp(mode="lossless") if name == "bf16" else parse(name)
        if not isinstance(codec, GComp):
            raise Unsupported(f"{name}: on a GPU gcomp is measured, and bf16 for lossless BF16")
        self.item = torch.empty(0, dtype=dtype).element_size()
        self.job = Job(codec.mode, 23 if codec.keep is None else codec.keep, codec.round == "truncate")
        numel = raw_bytes // self.item
        self.sets = max(1, min(16, _ROTATED // raw_bytes))
        gradient = _grown(sample.values, numel)
        # Each set starts elsewhere in the sample, so that no two are alike.
        self.inputs = [gradient.roll(4096 * 37 * i).to(dtype).chunk(chunks) for i in range(self.sets)]
        self.floors = _floors(sample, codec, numel, [part.numel() for part in self.inputs[0]])
        self.outputs = [
            [torch.empty(body_bound(p.numel(), dtype), dtype=torch.uint8, device="cuda") for p in parts]
            for parts in self.inputs
        ]
        self.lengths = [
            cuda.code_lengths(cuda.histogram(part, self.job, floor)) for part, floor in zip(self.inputs[0], self.floors)
        ]
        self.decoded = [torch.empty_like(part) for part in self.inputs[0]]

    def encode(self, i: int) -> list[int]:
        return cuda.encode_many(self.inputs[i], self.job, self.outputs[i], self.floors, self.lengths)

    def result(self) -> GpuResult:
        sizes = [self.encode(i) for i in range(self.sets)]
        bodies = [[out[:n] for out, n in zip(outs, ns)] for outs, ns in zip(self.outputs, sizes)]
        self._verify(bodies[0])
        encode = _median_ms(self.encode, self.sets)
        decode = _median_ms(lambda i: cuda.decode_many(bodies[i], self.decoded, self.floors), self.sets)
        copies = [torch.cat([p.reshape(-1) for p in parts]) for parts in self.inputs[: min(self.sets, 4)]]
        target = torch.empty_like(copies[0])
        copy = _median_ms(lambda i: target.copy_(copies[i % len(copies)]), self.sets)
        size = sum(sizes[0])
        traffic = self.raw_bytes + size + self.raw_bytes * self._floor_reads()
        at_most = 2 * self.raw_bytes / copy  # bytes per ms that the memory really moves
        return GpuResult(
            codec=self.name, mib=self.raw_bytes / MIB, chunks=self.chunks, ratio=self.raw_bytes / size,
            encode_gbps=_gbps(self.raw_bytes, encode), decode_gbps=_gbps(self.raw_bytes, decode),
            copy_gbps=_gbps(self.raw_bytes, copy), encode_floor=traffic / at_most / encode,
            decode_floor=traffic / at_most / decode, device=torch.cuda.get_device_name(),
        )  # fmt: skip

    def _floor_reads(self) -> int:
        """How often as much as the input is read besides, to make floors."""
        floor = self.floors[0]
        return 0 if not isinstance(floor, Floor) else 1 if floor.second is None else 2

    def _verify(self, bodies: list[torch.Tensor]) -> None:
        """Lossless modes give the input back; for all, coding what was decoded gives the same bytes again."""
        cuda.decode_many(bodies, self.decoded, self.floors)
        kind = torch.int32 if self.item == 4 else torch.int16
        for number, (part, decoded, body) in enumerate(zip(self.inputs[0], self.decoded, bodies)):
            if self.job.mode == "lossless" and not torch.equal(decoded.view(kind), part.view(kind)):
                raise WrongRoundTrip(f"{self.name}: the round trip changed values")
            again = torch.empty(body_bound(part.numel(), part.dtype), dtype=torch.uint8, device="cuda")
            size = cuda.encode(decoded, self.job, again, self.floors[number], self.lengths[number])
            if not torch.equal(again[:size], body):
                raise WrongRoundTrip(f"{self.name}: encoding the decoded values gave other bytes")


def _grown(values: torch.Tensor, numel: int) -> torch.Tensor:
    return values.cuda().repeat(-(-numel // values.numel()))[:numel].contiguous()


def _floors(sample: Sample, codec: GComp, numel: int, sizes: list[int]) -> list[torch.Tensor | Floor | None]:
    floor = sample.floor(codec)
    if floor is None:
        return [None] * len(sizes)
    if isinstance(floor, Floor):
        second = None if floor.second is None else _grown(floor.second, numel)
        whole: torch.Tensor | Floor = Floor(_grown(floor.theta, numel), second, floor.c0, floor.c1, floor.c2)
    else:
        whole = _grown(floor, numel)
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [whole[end - size : end] for end, size in zip(ends, sizes)]


def _median_ms(call: Callable[[int], object], sets: int, least: int = 15, budget_ms: float = 150.0) -> float:
    """Median time of call(i), i counting through the input sets."""
    for i in range(3):
        call(i % sets)
    torch.cuda.synchronize()
    times: list[float] = []
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    stream = torch.cuda.current_stream()  # looked up here: events would do so between the end of a call and theirs
    end.record(stream)  # the first time creates it, which is no part of a call
    while len(times) < least or (sum(times) < budget_ms and len(times) < 100):
        begin.record(stream)
        call(len(times) % sets)
        end.record(stream)
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def _gbps(raw_bytes: int, ms: float) -> float:
    return raw_bytes / ms / 1e6


# --- nvCOMP --------------------------------------------------------------------------------------------------------


def _nvcomp(sample: Sample, raw_bytes: int) -> Iterator[GpuResult]:
    """NVIDIA's codecs through their Python interface, where it is importable: on the raw floats, as bytes."""
    try:
        nvcomp: ModuleType = importlib.import_module("nvidia.nvcomp")
    except ImportError:
        return
    x = _grown(sample.values, raw_bytes // 4).view(torch.uint8)
    copy = _median_ms(lambda _: x.clone(), 1, 5, 30.0)
    for algorithm in ("ANS", "Bitcomp", "LZ4"):
        codec = nvcomp.Codec(algorithm=algorithm)
        packed = codec.encode(nvcomp.as_array(x))
        back = torch.as_tensor(codec.decode(packed), device="cuda").view(torch.uint8)
        if not torch.equal(back, x):
            raise WrongRoundTrip(f"nvCOMP's {algorithm} changed values")
        encode = _median_ms(lambda _, c=codec: c.encode(nvcomp.as_array(x)), 1, 5, 30.0)  # type: ignore[misc]
        decode = _median_ms(lambda _, c=codec, p=packed: c.decode(p), 1, 5, 30.0)  # type: ignore[misc]
        yield GpuResult(
            codec=f"nvcomp {algorithm}", mib=raw_bytes / MIB, chunks=1, ratio=raw_bytes / packed.buffer_size,
            encode_gbps=_gbps(raw_bytes, encode), decode_gbps=_gbps(raw_bytes, decode),
            copy_gbps=_gbps(raw_bytes, copy), encode_floor=0.0, decode_floor=0.0, device=torch.cuda.get_device_name(),
        )  # fmt: skip
