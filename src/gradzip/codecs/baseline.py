"""The codecs to beat: no coding, 16-bit casts, and the general-purpose compressors."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from .. import wire
from ..errors import Corrupt, Unsupported
from .base import Codec, Context, Lossy, deliver, register, typed


@register
@dataclass(frozen=True)
class Identity(Codec):
    """The tensor as it is."""

    name: ClassVar[str] = "identity"
    wire_id: ClassVar[int] = 0
    summary: ClassVar[str] = "the values as they are"
    summable: ClassVar[bool] = True
    cuttable: ClassVar[bool] = True

    @property
    def lossless(self) -> bool:
        return True

    def _body_bound(self, numel: int, dtype: torch.dtype) -> int:
        return numel * dtype.itemsize

    def _check_claim(self, header: wire.Header) -> None:
        if header.body_bytes != header.numel * header.dtype.itemsize:
            raise Corrupt(f"{header.numel} values do not fit a body of {header.body_bytes} bytes")

    def _encode(self, x: torch.Tensor, ctx: Context, body: torch.Tensor) -> int:
        size = x.numel() * x.itemsize
        body[:size] = x.view(torch.uint8)
        return size

    def _decode(self, body: torch.Tensor, ctx: Context, out: torch.Tensor, add: bool) -> None:
        if body.numel() != out.numel() * out.itemsize:
            raise Corrupt(f"{out.numel()} values do not fit a body of {body.numel()} bytes")
        deliver(typed(body, out.dtype), out, add)

    def _addends(self, body: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return body.view(dtype)


@register
@dataclass(frozen=True)
class Cast(Lossy):
    """Rounded to 16 bits: what torch's bf16 and fp16 hooks send."""

    name: ClassVar[str] = "cast"
    wire_id: ClassVar[int] = 1
    summary: ClassVar[str] = "rounded to bf16 or fp16, 2 bytes per value"
    error: ClassVar[str] = "rounding, by up to 1/512 (bf16) or 1/4096 (fp16) of each value"
    summable: ClassVar[bool] = True
    cuttable: ClassVar[bool] = True
    to: str = "bf16"

    _TYPES: ClassVar[dict[str, torch.dtype]] = {"bf16": torch.bfloat16, "fp16": torch.float16}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.to not in self._TYPES:
            raise Unsupported(f"cast:to={self.to!r}: choose bf16 or fp16")

    @property
    def dtype(self) -> torch.dtype:
        """The type that values are rounded to."""
        return self._TYPES[self.to]

    def _body_bound(self, numel: int, dtype: torch.dtype) -> int:
        return 4 + 2 * numel

    def _check_claim(self, header: wire.Header) -> None:
        if header.body_bytes != 4 + 2 * header.numel:
            raise Corrupt(f"{header.numel} cast values do not fit a body of {header.body_bytes} bytes")

    def _encode(self, x: torch.Tensor, ctx: Context, body: torch.Tensor) -> int:
        size = 4 + 2 * x.numel()
        code = wire.DTYPE_CODES[self._TYPES[self.to]]
        body[:4] = torch.tensor([code, 0, 0, 0], dtype=torch.uint8)
        body[4:size] = x.to(self._TYPES[self.to]).view(torch.uint8)
        return size

    def _decode(self, body: torch.Tensor, ctx: Context, out: torch.Tensor, add: bool) -> None:
        if body.numel() != 4 + 2 * out.numel():
            raise Corrupt(f"{out.numel()} cast values do not fit a body of {body.numel()} bytes")
        head = body[:4].tolist()
        types = {wire.DTYPE_CODES[t]: t for t in self._TYPES.values()}
        if head[0] not in types or any(head[1:]):
            raise Corrupt("the cast's target type is unknown")
        deliver(typed(body[4:], types[head[0]]).to(out.dtype), out, add)

    def _addends(self, body: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return body[4:].view(self._TYPES[self.to])


class ByteCodec(Codec, ABC):
    """A general-purpose compressor over the tensor's bytes, on the CPU."""

    fixed_size: ClassVar[bool] = False
    cuttable: ClassVar[bool] = True
    expansion: ClassVar[int]  # bytes that one packed byte can stand for at the most

    @property
    def lossless(self) -> bool:
        return True

    def _check_claim(self, header: wire.Header) -> None:
        if header.numel * header.dtype.itemsize > header.body_bytes * self.expansion:
            raise Corrupt(f"{header.numel} values cannot be in a {self.name} body of {header.body_bytes} bytes")

    @abstractmethod
    def pack(self, data: memoryview) -> bytes: ...

    @abstractmethod
    def unpack(self, data: memoryview, size: int) -> bytes: ...

    def _body_bound(self, numel: int, dtype: torch.dtype) -> int:
        size = numel * dtype.itemsize
        return size + size // 200 + 1024  # covers the worst case of zlib, zstd and lz4

    def _encode(self, x: torch.Tensor, ctx: Context, body: torch.Tensor) -> int:
        packed = self.pack(x.cpu().view(torch.uint8).numpy().data)
        body[: len(packed)] = torch.frombuffer(bytearray(packed), dtype=torch.uint8).to(body.device)
        return len(packed)

    def _decode(self, body: torch.Tensor, ctx: Context, out: torch.Tensor, add: bool) -> None:
        size = out.numel() * out.itemsize
        try:
            data = self.unpack(body.cpu().contiguous().numpy().data, size)
        except Unsupported:
            raise
        except Exception as cause:  # each library has its own exception type
            raise Corrupt(f"{self.name} cannot unpack the frame: {cause}") from cause
        if len(data) != size:
            raise Corrupt(f"{self.name} unpacked {len(data)} bytes where {size} were expected")
        if size:
            deliver(torch.frombuffer(bytearray(data), dtype=out.dtype).to(out.device), out, add)


@register
@dataclass(frozen=True)
class Zlib(ByteCodec):
    """DEFLATE from the standard library."""

    name: ClassVar[str] = "zlib"
    wire_id: ClassVar[int] = 3
    summary: ClassVar[str] = "DEFLATE over the bytes, on the CPU"
    expansion: ClassVar[int] = 1032
    level: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.level <= 9:
            raise Unsupported("zlib:level must be 0 to 9")

    def pack(self, data: memoryview) -> bytes:
        return zlib.compress(data, self.level)

    def unpack(self, data: memoryview, size: int) -> bytes:
        machine = zlib.decompressobj()
        result = machine.decompress(data, size + 1)
        if not machine.eof or machine.unused_data:
            raise Corrupt("the zlib stream does not end with the frame")
        return result


def _extra(name: str, load: Callable[[], Any]) -> Any:
    try:
        return load()
    except ImportError:
        raise Unsupported(f"the {name} codec needs one package more: pip install 'gradzip[baselines]'") from None


@register
@dataclass(frozen=True)
class Zstd(ByteCodec):
    """Zstandard, from the package zstandard."""

    name: ClassVar[str] = "zstd"
    wire_id: ClassVar[int] = 4
    summary: ClassVar[str] = "Zstandard over the bytes, on the CPU (extra: baselines)"
    expansion: ClassVar[int] = 1 << 15  # a block of 128 KB can be one byte behind a head of three
    level: int = 1

    def __post_init__(self) -> None:
        if not -7 <= self.level <= 22:
            raise Unsupported("zstd:level must be -7 to 22")

    @staticmethod
    def _library() -> Any:
        def load() -> Any:
            import zstandard

            return zstandard

        return _extra("zstd", load)

    def pack(self, data: memoryview) -> bytes:
        packed: bytes = self._library().ZstdCompressor(level=self.level).compress(data)
        return packed

    def unpack(self, data: memoryview, size: int) -> bytes:
        library = self._library()
        if library.frame_content_size(data) != size:
            raise Corrupt("the zstd frame announces another size")
        result: bytes = library.ZstdDecompressor().decompress(data, max_output_size=size, allow_extra_data=False)
        return result


@register
@dataclass(frozen=True)
class Lz4(ByteCodec):
    """LZ4 block format, from the package lz4."""

    name: ClassVar[str] = "lz4"
    wire_id: ClassVar[int] = 5
    summary: ClassVar[str] = "LZ4 over the bytes, on the CPU (extra: baselines)"
    expansion: ClassVar[int] = 255

    @staticmethod
    def _library() -> Any:
        def load() -> Any:
            import lz4.block

            return lz4.block

        return _extra("lz4", load)

    def pack(self, data: memoryview) -> bytes:
        packed: bytes = self._library().compress(data, store_size=False)
        return packed

    def unpack(self, data: memoryview, size: int) -> bytes:
        result: bytes = self._library().decompress(data, uncompressed_size=size)
        return result
