"""The frame: header, checksum, and that nothing damaged is taken for whole."""

from __future__ import annotations

import struct

import pytest
import torch
from conftest import DTYPES, gradient
from hypothesis import given
from hypothesis import strategies as st

import gradzip
from gradzip import wire
from gradzip.errors import CodecError, Corrupt, Truncated, Unsupported

FRAME_DTYPES = [*DTYPES, torch.float64]
CODECS = ["identity", "cast:to=bf16", "cast:to=fp16", "zlib", "gcomp:mode=lossless"]

bytestrings = st.binary(max_size=300).map(lambda data: torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8))


def frame_of(codec: str, check: bool, numel: int = 40) -> torch.Tensor:
    return gradzip.encode(gradient(numel), codec, check=check)


def damaged(frame: torch.Tensor, offset: int, value: int) -> torch.Tensor:
    copy = frame.clone()
    copy[offset] = value
    return copy


@given(
    codec_id=st.integers(0, 255),
    dtype=st.sampled_from(FRAME_DTYPES),
    numel=st.integers(0, wire.MAX_NUMEL),
    body=bytestrings,
    check=st.booleans(),
)
def test_header_round_trip(codec_id: int, dtype: torch.dtype, numel: int, body: torch.Tensor, check: bool) -> None:
    start = wire.body_offset(check)
    frame = torch.zeros(start + body.numel(), dtype=torch.uint8)
    frame[start:] = body
    wire.write_header(frame, codec_id, dtype, numel, body.numel(), check)
    header = wire.read_header(frame)
    assert (header.codec_id, header.dtype, header.numel, header.body_bytes) == (codec_id, dtype, numel, body.numel())
    assert header.body_offset == start
    assert header.frame_bytes == frame.numel()
    assert (header.checksum is not None) == check
    wire.verify_checksum(frame, header)


def test_header_bytes_are_those_of_the_specification() -> None:
    packed = wire.pack_header(codec_id=2, dtype=torch.bfloat16, numel=0x0102030405, body_bytes=7, check=True)
    assert packed == bytes.fromhex("475a 01 02 01 01 0000 0504030201000000 0700000000000000")


# -- checksum --------------------------------------------------------------------------------------------------------


def checksum_by_hand(data: bytes, first_word: int) -> int:
    """docs/format.md, "Frame", word for word."""
    data += bytes(-len(data) % 4)
    total = 0
    for i, (word,) in enumerate(struct.iter_unpack("<I", data)):
        x = (word + (i + first_word) * 0x9E3779B9) % 2**32
        x ^= x >> 16
        x = x * 0x7FEB352D % 2**32
        x ^= x >> 15
        x = x * 0x846CA68B % 2**32
        x ^= x >> 16
        total += x
    return total % 2**64


@given(bytestrings, st.integers(0, 1 << 40))
def test_checksum_follows_the_specification(data: torch.Tensor, first_word: int) -> None:
    expected = checksum_by_hand(data.numpy().tobytes(), first_word)
    assert wire.checksum(data, first_word) % 2**64 == expected


@given(bytestrings, st.integers(0, 75))
def test_checksum_of_parts_adds_up(data: torch.Tensor, words: int) -> None:
    cut = 4 * min(words, data.numel() // 4)
    parts = wire.checksum(data[:cut], 5) + wire.checksum(data[cut:], 5 + cut // 4)
    assert parts == wire.checksum(data, 5)


@given(bytestrings, st.data())
def test_checksum_sees_every_flipped_bit(data: torch.Tensor, draw: st.DataObject) -> None:
    bit = draw.draw(st.integers(0, 8 * data.numel() - 1))
    flipped = data.clone()
    flipped[bit // 8] ^= 1 << (bit % 8)
    assert wire.checksum(flipped, 0) != wire.checksum(data, 0)


@pytest.mark.parametrize("codec", CODECS)
def test_a_checked_frame_survives_no_flipped_bit(codec: str) -> None:
    frame = frame_of(codec, check=True)
    for bit in range(0, 8 * frame.numel()):
        flipped = frame.clone()
        flipped[bit // 8] ^= 1 << (bit % 8)
        with pytest.raises(CodecError):
            gradzip.decode(flipped)


# -- ends ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("codec", CODECS)
def test_every_strict_prefix_is_truncated(codec: str, check: bool) -> None:
    frame = frame_of(codec, check)
    for size in range(frame.numel()):
        with pytest.raises(Truncated):
            gradzip.decode(frame[:size].clone())


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("codec", CODECS)
def test_an_extra_byte_is_corrupt(codec: str, check: bool) -> None:
    frame = frame_of(codec, check)
    with pytest.raises(Corrupt, match="follow the end"):
        gradzip.decode(torch.cat([frame, frame[:1]]))


# -- header fields ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bit", range(1, 24))  # bit 0 is the checksum flag
def test_reserved_bits_are_rejected(bit: int) -> None:
    frame = frame_of("identity", check=False)
    with pytest.raises(Corrupt, match="reserved"):
        gradzip.decode(damaged(frame, 5 + bit // 8, 1 << bit % 8))


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (0, 0, "not a gradzip frame"),
        (1, 0, "not a gradzip frame"),
        (3, 255, "unknown codec"),
        (4, 4, "dtype"),
    ],
)
def test_wrong_fields_are_named(offset: int, value: int, message: str) -> None:
    with pytest.raises(Corrupt, match=message):
        gradzip.decode(damaged(frame_of("identity", check=False), offset, value))


@pytest.mark.parametrize("codec", [*CODECS, "noise", "int8", "int4", "fp8"])
@pytest.mark.parametrize(
    ("version", "cure"), [(0, "make the frame anew"), (2, "install a later gradzip"), (255, "install a later gradzip")]
)
def test_frames_of_another_version_are_refused(codec: str, version: int, cure: str) -> None:
    frame = frame_of(codec, check=False)
    assert int(frame[2]) == 1
    frame[2] = version
    found = f"version {version}; this gradzip reads version 1: {cure}, and use the same gradzip on all ranks"
    with pytest.raises(Corrupt, match=found):
        gradzip.decode(frame)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("numel", [41, 1 << 30, wire.MAX_NUMEL, wire.MAX_NUMEL + 1, (1 << 64) - 1])
def test_a_wrong_element_count_is_corrupt_before_memory_is_taken(codec: str, numel: int) -> None:
    frame = frame_of(codec, check=False)
    frame[8:16] = torch.frombuffer(bytearray(struct.pack("<Q", numel)), dtype=torch.uint8)
    with pytest.raises(Corrupt):
        gradzip.decode(frame)


@pytest.mark.parametrize(
    "payload", [torch.zeros(40), torch.zeros(40, dtype=torch.int8), torch.zeros(2, 40, dtype=torch.uint8)]
)
def test_a_payload_is_flat_bytes(payload: torch.Tensor) -> None:
    with pytest.raises(Unsupported, match="1-D uint8"):
        gradzip.decode(payload)


def test_integers_have_no_frame() -> None:
    with pytest.raises(Unsupported, match="float32"):
        gradzip.encode(torch.arange(3), "identity")


@given(bytestrings)
def test_random_bytes_are_never_a_frame(data: torch.Tensor) -> None:
    with pytest.raises(CodecError):
        gradzip.decode(data)
