"""The tables before the blobs of a message: what was packed comes back, and a damaged table is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradzip.collectives.blobs import Blob, pack, unpack_numbered
from gradzip.errors import PeerError

sizes = st.lists(st.integers(0, 5).map(lambda n: 8 * n), min_size=1, max_size=3)
packed = st.tuples(st.integers(1, 3), sizes, st.lists(st.integers(-(2**40), 2**40), max_size=3))


def message(count: int, blob_sizes: list[int], numbers: list[int]) -> torch.Tensor:
    blobs = [Blob(torch.full((size,), 7, dtype=torch.uint8)) for size in blob_sizes]
    return pack([blobs] * count, *numbers)


@given(packed)
def test_what_was_packed_comes_back(case: tuple[int, list[int], list[int]]) -> None:
    count, blob_sizes, numbers = case
    blobs, found = unpack_numbered(message(*case), source=2)
    assert found == numbers
    assert [[blob.data.numel() for blob in row] for row in blobs] == [blob_sizes] * count
    assert all(blob.source == 2 and bool((blob.data == 7).all()) for row in blobs for blob in row)


@given(packed, st.integers(0, 8), st.integers(-(2**62), 2**62))
def test_a_damaged_table_is_refused_or_stays_inside(
    case: tuple[int, list[int], list[int]], place: int, value: int
) -> None:
    payload = message(*case)
    entries = payload.view(torch.int64)
    entries[place % entries.numel()] = value
    try:
        blobs, _ = unpack_numbered(payload, source=2)
    except PeerError:
        return
    assert sum(blob.data.numel() for row in blobs for blob in row) <= payload.numel()


@pytest.mark.parametrize("keep", range(0, 56, 8))
def test_a_cut_message_is_refused(keep: int) -> None:
    payload = message(1, [16], [])
    assert payload.numel() == 56
    with pytest.raises(PeerError, match="rank 5 sent a damaged message"):
        unpack_numbered(payload[:keep], source=5)
