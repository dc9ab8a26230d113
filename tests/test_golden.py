"""Frames that are kept in tests/golden: every engine still writes and reads them byte for byte."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import goldens
import numpy as np
import pytest
import torch
from conftest import same_bits
from engine_cases import Case, isas, mapped, native_on
from goldens import DIGEST, FOLDER, LARGEST, MESSAGES, Golden, Message
from handmade import HANDMADE, Frame

from gradzip import Codec, Context, engines, parse, wire
from gradzip.codecs import books
from gradzip.codecs.gcomp import GComp
from gradzip.engines import reference
from gradzip.engines.scaled_layout import Parts

GOLDENS = goldens.goldens()
HELP = "the format changed, and this version of it is kept for ever: a change takes a new version"


@pytest.fixture(params=["reference", *isas()])
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every engine, the native one once per instruction set."""
    if request.param == "reference":
        with engines.use("reference"):
            yield "reference"
    else:
        with native_on(request.param), engines.use("native"):
            yield request.param


def stored(name: str) -> torch.Tensor:
    return torch.frombuffer(bytearray((FOLDER / f"{name}.bin").read_bytes()), dtype=torch.uint8)


def expected(golden: Golden, codec: Codec) -> torch.Tensor:
    """What a golden frame holds, without decoding it."""
    if not isinstance(codec, GComp):
        return codec.decode(codec.encode(golden.x, golden.context()), golden.context())
    return mapped(Case(golden.x, codec._job(golden.context()), golden.floor, None, None))


@pytest.mark.parametrize("name", GOLDENS)
def test_encoding_gives_the_bytes_kept(name: str, engine: str) -> None:
    assert torch.equal(torch.frombuffer(bytearray(GOLDENS[name].encode()), dtype=torch.uint8), stored(name)), HELP


@pytest.mark.parametrize("name", GOLDENS)
def test_decoding_gives_the_values(name: str, engine: str) -> None:
    golden, codec = GOLDENS[name], GOLDENS[name].parsed()
    values = type(codec)().decode(stored(name), golden.context())
    assert same_bits(values, expected(golden, codec))
    if codec.lossless:
        assert same_bits(values, golden.x)


@pytest.mark.parametrize("name", MESSAGES)
def test_messages_are_written_and_read(name: str, engine: str) -> None:
    """Frames of many parts: what an exchange sends, and their sums."""
    message, frame = MESSAGES[name], stored(name)
    assert message.encode() == frame.numpy().tobytes(), HELP
    outs = read(message, frame, engines.noise("cpu") if message.codec == "noise" else engines.scaled("cpu"))
    with engines.use("reference"):
        oracle = read(message, frame, engines.noise("cpu") if message.codec == "noise" else engines.scaled("cpu"))
    values = [x + y if message.is_sum else y for x, y in zip(message.values(40), message.values(41))]
    for number, (got, wanted, x) in enumerate(zip(outs, oracle, values)):
        assert same_bits(got, wanted)
        if message.poisoned or (message.codec == "noise" and math.isnan(message.levels[number])):
            assert bool(got.isnan().all())
        elif message.codec == "noise":
            notch = int(frame[wire.HEADER_BYTES + 4])
            steps = 1 + 1.5**0.5 if message.is_sum else 2 ** (notch / 4)  # 1.5: the level of a sum of two, squared
            if level := message.levels[number]:
                assert float((got - x).abs().max()) <= 1.001 * steps * level
            assert level or not got.any()
        else:
            assert float((got - x).norm() / x.norm()) < 0.5, "far from what it was made of"


def read(message: Message, frame: torch.Tensor, engine: ModuleType) -> list[torch.Tensor]:
    """The values of a message's parts."""
    outs = [torch.full((size,), -1.0) for size in message.sizes]
    if message.codec == "noise":
        parts = [replace(part, values=out) for part, out in zip(message.noise_parts(1), outs)]
        engine.decode_frame(frame, parts, 7, DIGEST)
        return outs
    made = message.scaled_parts(1)
    parts_of_outs = Parts(made.form, [], outs, made.array["start"]).fill(0, made.array["signs"])
    engine.code(parts_of_outs, [frame])
    return outs


@pytest.mark.parametrize("name", HANDMADE)
def test_frames_made_by_hand_are_read(name: str, engine: str) -> None:
    frame = HANDMADE[name]
    data = frame.encode()
    assert stored(f"handmade-{name}").numpy().tobytes() == data, HELP
    floor = None if frame.floor is None else torch.tensor(frame.floor(), dtype=torch.int8)
    if frame.book:
        lengths = torch.zeros(256, dtype=torch.uint8)
        for symbol, length in frame.book.lengths.items():
            lengths[symbol] = length
        books.install(books.Book(frame.book_id, lengths))
    values = parse("gcomp").decode(stored(f"handmade-{name}"), Context(floor=floor))
    assert same_bits(values, as_tensor(frame))


def as_tensor(frame: Frame) -> torch.Tensor:
    if frame.dtype == 0:
        return torch.from_numpy(np.array(frame.values(), np.uint32).view(np.int32)).view(torch.float32)
    bits = torch.from_numpy(np.array(frame.values(), np.uint16).view(np.int16))
    return bits.view({1: torch.bfloat16, 2: torch.float16}[frame.dtype])


def test_the_frames_made_by_hand_use_everything() -> None:
    """The features of docs/format.md, as they are found in the blocks themselves."""
    found = set()
    for name, frame in HANDMADE.items():
        data, numel = stored(f"handmade-{name}").numpy(), len(frame.values())
        body = data[wire.HEADER_BYTES :]
        found |= {f"coding {body[0]}", "shared book" if body[1] else "tables"}
        at = reference.blocks_offset(numel, frame.book_id)
        index_at = reference.index_offset(numel, frame.book_id)
        for entry in body[index_at : index_at + 2 * reference.blocks_of(numel)].copy().view("<u2"):
            kind, size = int(entry) >> 14, 4 * (int(entry) & 0x3FFF)
            found.add(("raw", "dense", "sparse")[kind] if size else "empty")
            if kind == reference.DENSE:
                head = int(body[at : at + 4].copy().view("<u4")[0])
                found.add("pruned" if head >> 5 & 1 else "not pruned")
                found |= {word for bit, word in ((6, "escapes"), (7, "single")) if head >> bit & 1}
                found |= {f"planes {head & 3}", "rest" if head >> 2 & 7 else "no rest", f"padding {head >> 30}"}
            at += size
    everything = {"coding 0", "coding 1", "coding 2", "shared book", "tables", "raw", "dense", "sparse", "empty"}
    everything |= {"pruned", "not pruned", "escapes", "single", "planes 0", "planes 1", "planes 2", "rest", "no rest"}
    assert found >= everything


def test_no_file_is_forgotten_or_large() -> None:
    files = {path.stem: path for path in FOLDER.glob("*.bin")}
    assert set(files) == set(goldens.all_frames())
    assert max(path.stat().st_size for path in files.values()) <= LARGEST


def test_goldens_are_added_to_but_not_rewritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(goldens, "FOLDER", tmp_path)
    name = next(iter(goldens.all_frames()))
    goldens.write()
    goldens.write()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        path.name: path.read_bytes() for path in FOLDER.iterdir()
    }
    (tmp_path / f"{name}.bin").write_bytes(b"older")
    with pytest.raises(SystemExit, match=f"refused: frames of format version 1 are kept for ever, and {name} would"):
        goldens.write()
    assert (tmp_path / f"{name}.bin").read_bytes() == b"older"
