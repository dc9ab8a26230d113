"""What a codec makes of a gradient, and how fast, on one core.

A round trip is verified before anything is timed. Then copies, encodes and decodes take turns, so that all of them
meet the same machine, and the best of each counts. Times are CPU time of this one thread, pinned to one core. All
outputs go to buffers that were written before: a fresh buffer costs more in page faults than a fast codec costs.

The general-purpose compressors get the best case instead: their libraries are called directly on chunks of 1 MB that
stay in the cache, without gradzip's frame, and are not charged for moving the result anywhere.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from .. import engines, wire
from ..codecs import Codec, Context
from ..codecs.baseline import ByteCodec
from ..codecs.gcomp import GComp
from ..codecs.noise import Noise
from ..engines import noise_layout, reference_noise
from ..engines.layout import EXACT, Floor
from ..engines.noise_layout import PackedParts, Shapes, Slot
from ..errors import GradzipError, Unsupported
from ..sensitivity.shape import shape_of
from .entropy import bound_bits
from .sample import Sample

ROUNDS = 9
PATIENCE = 6.0  # seconds for one codec; slow ones get fewer rounds, but at least three
CHUNK = 1 << 18  # values, 1 MB
RANKS = 4  # of the exchange that noise's levels are for


@dataclass(frozen=True)
class Result:
    """One row of `gradzip bench codec`. GB are 1e9 bytes of the float32 tensor; bits are per value."""

    codec: str
    sample: str
    engine: str  # with the instruction set, for the native one; the library's name for others
    values: int
    ratio: float
    bits: float
    bound: float | None  # entropy bound, in bits
    over: float | None  # percent above the bound
    encode_gbps: float
    decode_gbps: float
    memcpy_gbps: float  # of the same rounds
    max_error: float  # largest |decoded - x| / |x|
    l2_error: float  # |decoded - x| / |x| of the whole vector

    @property
    def encode_memcpy(self) -> float:
        return self.encode_gbps / self.memcpy_gbps

    @property
    def decode_memcpy(self) -> float:
        return self.decode_gbps / self.memcpy_gbps


class WrongRoundTrip(GradzipError):
    """A codec did not give back what it should: it is not timed."""


class _Whole:
    """A gradzip codec on the whole tensor, into recycled buffers."""

    def __init__(self, codec: Codec, x: torch.Tensor, floor: torch.Tensor | Floor | None) -> None:
        self.codec, self.x, self.context = codec, x, Context(floor=floor)
        self.frame = torch.zeros(codec.bound(x.numel(), x.dtype), dtype=torch.uint8)
        self.back = torch.zeros_like(x)
        self.payload = self.frame

    def encode(self) -> None:
        self.payload = self.codec.encode(self.x, self.context, out=self.frame)

    def decode(self) -> None:
        self.codec.decode(self.payload, self.context, out=self.back)

    def size(self) -> int:
        return self.payload.numel()

    def decoded(self) -> torch.Tensor:
        return self.back


class _Parts:
    """The codec noise as an exchange of four ranks uses it: one frame of all parameters.

    Encoding includes the pass for the levels. With optimizer state there is a shape; it and the sum of its weights are
    made before the gradients are there, and not counted.
    """

    def __init__(self, codec: Noise, sample: Sample) -> None:
        self.engine, self.share, snapshot = engines.noise("cpu"), float(codec.share), sample.snapshot
        tensors = sample.tensors(sample.values)
        shapes = [shape_of(v) for v in sample.tensors(snapshot.second)] if snapshot else [None] * len(tensors)
        numbers, starts = np.arange(len(tensors)), np.zeros(len(tensors), np.int64)
        self.shapes, self.parts = Shapes(shapes), PackedParts(tensors, numbers, starts)
        of_names = [noise_layout.name_key(0, str(number), "own", 0) for number in numbers]
        self.keys = noise_layout.keys_in_step(np.array(of_names, np.uint64), 0)
        self.weights = self.engine.measure(self.parts.fill(self.keys, shapes=self.shapes)).weights
        self.back = torch.zeros_like(sample.values)
        self.outs = PackedParts(sample.tensors(self.back), numbers, starts).fill(self.keys, shapes=self.shapes)
        bound = noise_layout.body_bound([x.numel() for x in tensors])
        self.frame, self.written = torch.zeros(wire.HEADER_BYTES + bound, dtype=torch.uint8), 0

    def encode(self) -> None:
        found = self.engine.measure(self.parts.fill(self.keys))
        levels = noise_layout.levels(found._replace(weights=self.weights), self.share, RANKS)
        self.parts.fill(self.keys, levels=levels, shapes=self.shapes)
        (written,) = self.engine.encode_frames([Slot(self.parts, self.frame)], 0, 0)
        self.written = written.size

    def decode(self) -> None:
        self.engine.decode_frame(self.frame, self.outs, 0, 0)

    def size(self) -> int:
        return self.written

    def decoded(self) -> torch.Tensor:
        return self.back

    def bound(self) -> float:
        """Order-0 entropy of each parameter's integers, in bits per value."""
        total = 0.0
        for part in self.parts:
            _, count = np.unique(reference_noise.rounded(part, 0), return_counts=True)
            total += float((count * np.log2(part.values.numel() / count)).sum())
        return total / self.back.numel()


class _Chunked:
    """A general-purpose compressor on chunks; the memory of the previous round's results serves the next."""

    def __init__(self, codec: ByteCodec, x: torch.Tensor) -> None:
        self.codec = codec
        self.chunks = [chunk.view(torch.uint8).numpy().data for chunk in torch.split(x, CHUNK)]
        self.packed = [b""] * len(self.chunks)

    def encode(self) -> None:
        for i, chunk in enumerate(self.chunks):
            self.packed[i] = self.codec.pack(chunk)

    def decode(self) -> None:
        for packed, chunk in zip(self.packed, self.chunks):
            self.codec.unpack(memoryview(packed), chunk.nbytes)

    def size(self) -> int:
        return sum(map(len, self.packed))

    def decoded(self) -> torch.Tensor:
        parts = [self.codec.unpack(memoryview(p), c.nbytes) for p, c in zip(self.packed, self.chunks)]
        return torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.float32)


def measure(codec: Codec, sample: Sample, rounds: int = ROUNDS, patience: float = PATIENCE) -> Result:
    """Verifies and times one codec on one sample."""
    if codec.rounds > 1:
        raise Unsupported(f"{codec} exchanges in {codec.rounds} rounds and has no payload to measure")
    x, floor = sample.values, sample.floor(codec)
    subject = _subject(codec, sample, floor)
    subject.encode()
    subject.decode()
    decoded = subject.decoded().clone()
    _verify(codec, x, decoded, floor)
    copy, encode, decode = _best_times(subject.encode, subject.decode, x, rounds, patience)
    raw_bytes, size = x.numel() * x.itemsize, subject.size()
    bits = 8 * size / x.numel()
    bound = subject.bound() if isinstance(subject, _Parts) else bound_bits(codec, decoded, floor)
    max_error, l2_error = errors(x, decoded)
    return Result(
        codec=str(codec),
        sample=sample.name,
        engine=engine_of(codec),
        values=x.numel(),
        ratio=raw_bytes / size,
        bits=bits,
        bound=bound,
        over=None if not bound else 100 * (bits / bound - 1),
        encode_gbps=raw_bytes / encode / 1e9,
        decode_gbps=raw_bytes / decode / 1e9,
        memcpy_gbps=raw_bytes / copy / 1e9,
        max_error=max_error,
        l2_error=l2_error,
    )


def _subject(codec: Codec, sample: Sample, floor: torch.Tensor | Floor | None) -> _Whole | _Parts | _Chunked:
    if isinstance(codec, ByteCodec):
        return _Chunked(codec, sample.values)
    if isinstance(codec, Noise):
        return _Parts(codec, sample)
    return _Whole(codec, sample.values, floor)


def engine_of(codec: Codec) -> str:
    """What does the work for this codec on the CPU: an engine of gradzip, or a library."""
    if isinstance(codec, (GComp, Noise)):
        engine = engines.pick("cpu")
        return f"native/{engine.isa()}" if engine.NAME == "native" else str(engine.NAME)
    return codec.name if isinstance(codec, ByteCodec) else "torch"


def errors(x: torch.Tensor, decoded: torch.Tensor) -> tuple[float, float]:
    """Largest relative error of a value, and relative error of the whole, over the finite values."""
    finite = x.isfinite()
    exact, got = x[finite].double(), decoded[finite].double()
    difference = (got - exact).abs()
    there = exact != 0
    largest = float((difference[there] / exact[there].abs()).max()) if there.any() else float(difference.any())
    norm = float(exact.norm())
    return largest, float(difference.norm()) / norm if norm else float(difference.any())


def _verify(codec: Codec, x: torch.Tensor, decoded: torch.Tensor, floor: torch.Tensor | Floor | None) -> None:
    """What the codec promises: the same bits, or values no further away than a step of its grid."""
    if codec.lossless:
        if not torch.equal(decoded.view(torch.int32), x.view(torch.int32)):
            raise WrongRoundTrip(f"{codec} is lossless and gave back other values: this is a bug, please report it")
    elif isinstance(codec, (GComp, Noise)):
        if not torch.equal(decoded.isfinite(), x.isfinite()):
            raise WrongRoundTrip(f"{codec} made finite values infinite or the reverse: this is a bug, please report it")
        if isinstance(codec, Noise):
            return
        finite = x.isfinite()
        distance = (decoded[finite].double() - x[finite].double()).abs()
        if (distance > _step(codec, x, floor)[finite]).any():
            raise WrongRoundTrip(f"{codec} moved a value by more than it may: this is a bug, please report it")


def _step(codec: GComp, x: torch.Tensor, floor: torch.Tensor | Floor | None) -> torch.Tensor:
    """The spacing of the values that this codec keeps around x; subnormals may always go."""
    smallest = torch.finfo(torch.float32).tiny
    if floor is None:
        return x.double().abs() * 2.0 ** -(23 if codec.keep is None else codec.keep) + smallest
    if codec.mode == "paper":
        return x.double().abs() * 2.0**-5 + smallest  # 18 of 23 mantissa bits may go
    f = floor.tensor() if isinstance(floor, Floor) else floor
    return torch.where(f == EXACT, 0.0, torch.exp2(f.double())) + smallest


def _best_times(
    encode: Callable[[], object], decode: Callable[[], object], x: torch.Tensor, rounds: int, patience: float
) -> tuple[float, float, float]:
    # Memory of the same kind as the codecs' own: NumPy's arrays have huge pages, which makes copies a fifth faster.
    source, target = x.clone().numpy(), torch.zeros_like(x).numpy()
    jobs: tuple[Callable[[], object], ...] = (lambda: np.copyto(target, source), encode, decode)
    best = [float("inf")] * len(jobs)
    with one_core():
        deadline = time.monotonic() + patience
        for done in range(rounds):
            if done >= min(3, rounds) and time.monotonic() > deadline:
                break
            for i, job in enumerate(jobs):
                best[i] = min(best[i], _cpu_time(job))
    return best[0], best[1], best[2]


def _cpu_time(job: Callable[[], object]) -> float:
    start = time.thread_time()
    job()
    return max(time.thread_time() - start, 1e-9)


@contextmanager
def one_core() -> Iterator[None]:
    """This thread alone on one core, with one thread in torch and in the engine; all undone afterwards."""
    undo: list[Callable[[], object]] = []
    if hasattr(os, "sched_getaffinity"):
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {max(cores)})
        undo.append(lambda: os.sched_setaffinity(0, cores))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    undo.append(lambda: torch.set_num_threads(threads))
    engine = engines.pick("cpu")
    if engine.NAME == "native":
        engine_threads = engine.threads()
        engine.set_threads(1)
        undo.append(lambda: engine.set_threads(engine_threads))
    try:
        yield
    finally:
        for step in undo:
            step()
