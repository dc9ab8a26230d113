"""The native engine's calls for several tensors: frames, sums and losses of each by itself, and damage is named."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from conftest import floor_for, gradient, same_bits, special
from hypothesis import given, settings
from hypothesis import strategies as st
from rows_of_pieces import Tensors, rows

from gradzip import Context, parse
from gradzip.codecs.gcomp import GComp
from gradzip.engines import native
from gradzip.engines.layout import Job
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


def test_damaged_frames_name_their_part() -> None:
    xs, job = some([5000, 7], 3), Job("lossless")
    out = torch.empty(60000, dtype=torch.uint8)
    good = out[: encode_frames(xs, job, GComp.wire_id, out, [None, None])]
    outs = [torch.empty(5000), torch.empty(7)]
    for bad in (good[:-1], good[:8], good[:0], torch.cat([good, good[:8]]), good ^ 1):
        with pytest.raises(native.DamagedFrames) as caught:
            sum_frames([xs, good, bad.clone()], job, GComp.wire_id, outs, [None, None], add=False)
        assert caught.value.part == 2
