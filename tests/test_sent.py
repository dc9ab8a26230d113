"""A rank does not decode the sparse frames that it made itself: what it keeps and adds is what decoding gives."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import generator, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st

from gradzip.codecs import Context, parse
from gradzip.codecs.base import wide
from gradzip.codecs.packing import pack, unpack
from gradzip.codecs.sparse import SparseFrame
from gradzip.collectives.blobs import Blob
from gradzip.collectives.coder import TensorCoder
from gradzip.collectives.layout import Piece
from gradzip.collectives.sent import Sent
from gradzip.collectives.terms import How
from gradzip.errors import CodecError, Corrupt
from gradzip.exchange.peers.buffers import Buffers
from gradzip.feedback import Memory
from gradzip.wire import HEADER_BYTES

OWN, OF_A_SUM = How("gpu", 0, 1, 0, False), How("gpu", 1, 4, 2, True)


def values(numel: int, seed: int, special: float, dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(numel, generator=generator(seed))
    x[seed % numel] = special
    x[:: 1 + seed % 5] *= -0.0  # many of equal magnitude, and what is sent of them may be -0
    return x.to(dtype)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(
        ["topk:ratio=0.1", "topk:ratio=1.0", "threshold:value=0.5", "dgc:ratio=0.05", "topk:feedback=false"]
    ),
    st.lists(st.integers(1, 300), min_size=1, max_size=4),
    st.sampled_from([0.0, 1e30, math.nan, math.inf]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    st.booleans(),
    st.booleans(),
)
def test_what_a_rank_sent_is_what_it_would_decode(
    codec: str, sizes: list[int], special: float, dtype: torch.dtype, own: bool, strided: bool
) -> None:
    tensors = [values(n, i + n, special, dtype) for i, n in enumerate(sizes)]
    before = [t.clone() for t in tensors]
    contexts = [Context(f"t{i}", step=10**6, world=4) for i in range(len(sizes))]
    memory, how = Memory(0), OWN if own else OF_A_SUM
    coder = TensorCoder(parse(codec), tensors, contexts, memory, Buffers(), 2.0, 4)
    coder.prepare()
    leaf = tuple(Piece(i, 0, n) for i, n in enumerate(sizes))
    (blob,) = coder.encode([leaf], [coder.load(leaf)], how)
    assert isinstance(blob.values, Sent)
    decoded = [torch.empty_like(t) for t in tensors]
    coder.decode([leaf], [[decodable(blob)]], how, [decoded], add=False)
    for wanted in (dtype, torch.promote_types(dtype, torch.float32)):
        room = [torch.full((n, 2), 7.0, dtype=wanted) for n in sizes]
        for add in (False, True):
            results = []
            for each in (blob, decodable(blob)):
                outs = [x.clone()[:, 0] if strided else x[:, 0].contiguous() for x in room]
                coder.decode([leaf], [[each]], how, [outs], add)
                results.append(outs)
            assert all(same_bits(a.contiguous(), b.contiguous()) for a, b in zip(*results))
    coder.finish()
    memory.commit()
    unit = 2.0 if own else 2.0 / 4
    for i, (x, sent) in enumerate(zip(before, decoded)):
        stage = "gradient" if own else f"sum1.0-{x.numel()}"
        kept = memory._residuals.get(f"{stage}/t{i}")
        if coder.codec.error_memory is None:
            assert kept is None
        else:
            assert kept is not None
            assert same_bits(kept, (wide(x) - wide(sent)) / unit)


def decodable(blob: Blob) -> Blob:
    """As other ranks get it."""
    return blob._replace(values=None)


@pytest.mark.parametrize("codec", ["topk:ratio=0.01", "topk:ratio=0.3", "threshold:value=1.0", "sign", "qsgd:bits=3"])
def test_what_the_host_can_see_is_not_fetched_from_a_gpu(codec: str) -> None:
    """Headers, counts and last bytes come from the host's copy: those on the GPU are made illegible here."""
    x = torch.randn(3001, generator=generator(4))
    frame = parse(codec).encode(x, Context())
    there = frame.clone()
    there[:HEADER_BYTES] = 0
    if isinstance(parse(codec), SparseFrame):
        there[HEADER_BYTES : HEADER_BYTES + 8] = 255
    found = parse(codec).decode(there, Context(near=frame))
    assert same_bits(found, parse(codec).decode(frame, Context()))
    with pytest.raises(CodecError):
        parse(codec).decode(frame, Context(near=frame[:-1]))


def test_bits_behind_the_last_value_are_found_where_the_host_sees_them() -> None:
    packed = pack(torch.ones(3, dtype=torch.uint8), 1)
    near = packed | 128
    assert torch.equal(unpack(packed, 3, 1), torch.ones(3, dtype=torch.uint8))
    with pytest.raises(Corrupt):
        unpack(packed, 3, 1, near)
