"""The native engine's calls for several tensors: frames, sums and losses of each by itself, and damage is named."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from conftest import floor_for, gradient, random_bits, same_bits, special
from hypothesis import given, settings
from hypothesis import strategies as st
from rows_of_pieces import Tensors, rows

from gradzip import Context, parse, wire
from gradzip.codecs import books
from gradzip.codecs.gcomp import GComp
from gradzip.engines import native, reference
from gradzip.engines.layout import Job, body_bound
from gradzip.engines.native import Floors


def encode_frames(
    xs: Tensors, job: Job, codec: int, out: torch.Tensor, floors: Floors, lost: Tensors | None = None, scale: float = 1
) -> int:
    return native.encode_pieces(rows(xs, floors, lost), xs[0].dtype, job, codec, out, scale)


def note_lost(xs: Tensors, job: Job, floors: Floors, lost: Tensors, scale: float) -> None:
    native.note_lost_pieces(rows(xs, floors, lost), xs[0].dtype, job, scale)


def sum_frames(
    parts: Sequence[torch.Tensor | Tensors], job: Job, codec: int, outs: Tensors, floors: Floors, add: bool
) -> None:
    """A part is what encode_frames wrote, or a tensor for each of `outs`."""
    own = [part if isinstance(part, torch.Tensor) else np.array([x.data_ptr() for x in part], "<i8") for part in parts]
    native.sum_pieces(own, rows(outs, floors), outs[0].dtype, job, codec, add)


def some(sizes: Sequence[int], seed: int) -> list[torch.Tensor]:
    return [special(size) if size % 5 == 4 else gradient(size, seed + i) for i, size in enumerate(sizes)]


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.sampled_from([1, 5, 100, 4096, 5004, 9001]), min_size=1, max_size=4),
    codec=st.sampled_from(["gcomp:mode=lossless", "gcomp:keep=7", "gcomp:keep=0,round=truncate", "gcomp"]),
    seed=st.integers(0, 1000),
    isa=st.sampled_from(native.available_isas()),
)
def test_frames_sums_and_losses(sizes: list[int], codec: str, seed: int, isa: str) -> None:
    chosen, xs = parse(codec), some(sizes, seed)
    assert isinstance(chosen, GComp)
    contexts = [Context(floor=floor_for(x, seed) if codec == "gcomp" else None) for x in xs]
    floors, job = [c.floor for c in contexts], chosen._job(Context())
    out = torch.empty(sum(32 + chosen.bound(n, torch.float32) for n in sizes), dtype=torch.uint8)
    lost = [torch.empty(n) for n in sizes]
    before = native.isa()
    native.set_isa(isa)
    try:
        size = encode_frames(xs, job, GComp.wire_id, out, floors, lost=lost, scale=3.0)
        at = 8 * len(xs)
        for x, context, n in zip(xs, contexts, out[:at].view(torch.int64).tolist()):
            assert torch.equal(out[at : at + n], chosen.encode(x, context))
            at += n + -n % 8
        assert at == size
        decoded = [chosen.decode(chosen.encode(x, c), c) for x, c in zip(xs, contexts)]
        for x, y, got in zip(xs, decoded, lost):
            expected = (x - y) / 3.0
            assert same_bits(got[expected.isfinite()], expected[expected.isfinite()])
            assert torch.equal(got.isnan(), expected.isnan())
        others = [torch.empty(n) for n in sizes]
        note_lost(xs, job, floors, others, 3.0)
        assert all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(others, lost))
        sums = [torch.ones(n) for n in sizes]
        sum_frames([xs, out[:size], xs], job, GComp.wire_id, sums, floors, add=True)
        for y, got in zip(decoded, sums):
            expected = torch.ones_like(y).add_(y).add_(y).add_(y)
            assert torch.equal(got.nan_to_num(7.0), expected.nan_to_num(7.0))
    finally:
        native.set_isa(before)


def of_few(kind: str, size: int, seed: int) -> torch.Tensor:
    x = gradient(size, seed)
    if kind == "special":
        return special(size + seed % 40)[seed % 40 :]
    if kind == "bits":
        return random_bits(size, seed)
    if kind == "one":
        return torch.full((size,), 1.5)
    if kind == "zeros":
        x[: -1 - seed % 3] = 0
    return x


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(
        st.sampled_from([0, 1, 2, 3, 31, 32, 33, 64, 255, 256, 1024, 1025, 4096, 4097]), min_size=1, max_size=5
    ),
    kind=st.sampled_from(["gradient", "special", "bits", "one", "zeros"]),
    job=st.sampled_from([Job("lossless"), Job("keep", 7), Job("keep", 0, True), Job("near"), Job("lossless", limit=3)]),
    book=st.booleans(),
    divisor=st.sampled_from([1, 2, 3]),
    seed=st.integers(0, 1000),
)
def test_small_tensors_get_the_bytes_of_the_reference(
    sizes: list[int], kind: str, job: Job, book: bool, divisor: int, seed: int
) -> None:
    xs = [of_few(kind, size, seed + i) for i, size in enumerate(sizes)]
    floors = [floor_for(x, seed) if job.mode == "near" else None for x in xs]
    lengths = [books.lengths(books.PRIOR_ID, max(1, x.numel())) if book else None for x in xs]
    job = dataclasses.replace(job, book=books.PRIOR_ID if book else 0)
    expected, decoded = list[torch.Tensor](), list[torch.Tensor]()
    for x, floor, of_x in zip(xs, floors, lengths):
        body = torch.zeros(body_bound(x.numel(), x.dtype), dtype=torch.uint8)
        expected.append(body[: reference.encode(x, job, body, floor, of_x)])
        decoded.append(torch.empty_like(x))
        reference.decode(expected[-1], decoded[-1], floor, book=of_x)
    before = native.isa()
    try:
        for isa in native.available_isas():
            native.set_isa(isa)
            out = torch.empty(sum(40 + body_bound(n, torch.float32) for n in sizes), dtype=torch.uint8)
            sums = [torch.empty_like(x) for x in xs]
            into, of = rows(sums, floors), rows(xs, floors)
            of["lengths"] = into["lengths"] = [0 if each is None else each.data_ptr() for each in lengths]
            size, at = native.encode_pieces(of, torch.float32, job, GComp.wire_id, out), 8 * len(xs)
            for body, n in zip(expected, out[:at].view(torch.int64).tolist()):
                assert torch.equal(out[at + wire.HEADER_BYTES : at + n], body)
                at += n + -n % 8
            assert at == size
            own = np.array([x.data_ptr() for x in xs], "<i8")
            frames: list[torch.Tensor | np.ndarray] = [out[:size], own, out[:size]]
            for count in (1, 3):
                native.sum_pieces(frames[:count], into, torch.float32, job, GComp.wire_id, False, divisor)
                for y, got in zip(decoded, sums):
                    total = y.clone()
                    for _ in range(count - 1):
                        total += y
                    total = total / divisor
                    assert torch.equal(total.isnan(), got.isnan())
                    assert same_bits(total[~total.isnan()], got[~total.isnan()])
    finally:
        native.set_isa(before)


def test_damaged_frames_name_their_part() -> None:
    xs, job = some([5000, 7], 3), Job("lossless")
    out = torch.empty(60000, dtype=torch.uint8)
    good = out[: encode_frames(xs, job, GComp.wire_id, out, [None, None])]
    outs = [torch.empty(5000), torch.empty(7)]
    for bad in (good[:-1], good[:8], good[:0], torch.cat([good, good[:8]]), good ^ 1):
        with pytest.raises(native.DamagedFrames) as caught:
            sum_frames([xs, good, bad.clone()], job, GComp.wire_id, outs, [None, None], add=False)
        assert caught.value.part == 2
