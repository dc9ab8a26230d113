"""Code lengths and codes: optimal, complete, and the same in Python and C++."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from gradzip import engines
from gradzip.codecs.prior import PRIOR_LENGTHS
from gradzip.engines import huffman
from gradzip.engines.layout import ESCAPE
from gradzip.errors import Corrupt

native = engines.load("native")

counts = st.integers(0, 5) | st.integers(0, 5000) | st.integers(0, 1 << 40)


def like_exponents(seed: int) -> np.ndarray:
    """Counts that fall off by some factor on both sides of symbol 0, as those of real exponents do."""
    rng = np.random.default_rng(seed)
    falls = np.exp(-np.minimum(np.arange(256), np.arange(256, 0, -1)) * rng.uniform(0.01, 2))
    return rng.poisson(falls * 10 ** rng.uniform(0, 6))


def of_few(seed: int) -> np.ndarray:
    """Those of a sample of a small tensor: up to 40 symbols, many of them equally frequent."""
    rng, histogram = np.random.default_rng(seed), np.zeros(256, np.int64)
    places = rng.choice(256, rng.integers(0, 41), replace=False)
    histogram[places] = rng.integers(1, rng.choice([2, 4, 64, 1 << 20]), len(places))
    return histogram


histograms = (
    st.integers(0, 1 << 32).map(of_few)
    | st.integers(0, 1 << 32).map(like_exponents)
    | arrays.arrays(np.int64, 256, elements=counts, fill=st.sampled_from([0, 1, 1000]))
)
limits = st.integers(1, 8)


@example(np.zeros(256, np.int64), 8)  # nothing was sampled: all is left to the escape
@example(np.ones(256, np.int64), 8)  # all qualify: one must go
@example(np.ones(256, np.int64), 1)
@example(np.arange(256), 8)
@example(np.arange(256) // 225, 8)  # 31 symbols, and 32 with the escape
@example(np.arange(256) // 224, 8)
@example(np.arange(256) // 253 << 40, 8)
@example(np.full(256, 1 << 40), 3)
@example((1 << np.arange(256) % 41).astype(np.int64), 8)  # would need far longer codes than are allowed
@given(histograms, limits)
def test_native_lengths_are_those_of_python(histogram: np.ndarray, limit: int) -> None:
    expected = huffman.code_lengths(histogram, limit)
    rows = torch.from_numpy(np.stack([histogram, histogram[::-1].copy()]))
    found = native.code_lengths(rows, limit)
    assert np.array_equal(found[0].numpy(), expected)
    assert np.array_equal(found[1].numpy(), huffman.code_lengths(histogram[::-1], limit))


@given(histograms, limits)
def test_codes_are_complete(histogram: np.ndarray, limit: int) -> None:
    lengths = huffman.code_lengths(histogram, limit)
    escape = huffman.escape_length(lengths)  # raises where the others leave no power of two
    assert lengths.max(initial=0) <= limit
    assert 0 <= escape <= limit
    used = sum(2.0 ** -int(n) for n in lengths if n) + 2.0**-escape
    assert used == 1
    assert set(np.flatnonzero(lengths)) <= set(np.flatnonzero(histogram))
    assert np.array_equal(huffman.unpack_table(huffman.pack_table(lengths)), lengths)


@given(histograms, limits)
def test_rare_symbols_are_left_to_the_escape(histogram: np.ndarray, limit: int) -> None:
    lengths, total = huffman.code_lengths(histogram, limit), int(histogram.sum())
    frequent = [s for s in range(256) if histogram[s] > 0 and int(histogram[s]) * 1024 >= total]
    if len(frequent) < 1 << limit:
        assert list(np.flatnonzero(lengths)) == frequent
    else:  # the rarest, of equals the highest, make room for the escape
        kept = sorted(frequent, key=lambda s: (-histogram[s], s))[: (1 << limit) - 1]
        assert list(np.flatnonzero(lengths)) == sorted(kept)


def best_cost(weights: list[int], limit: int) -> int:
    """The cheapest prefix code by trying every choice of lengths."""
    choices = itertools.product(range(1, limit + 1), repeat=len(weights))
    fitting = (c for c in choices if sum(2.0**-n for n in c) <= 1)
    return min(sum(w * n for w, n in zip(weights, c)) for c in fitting)


@given(st.lists(st.integers(1, 100), min_size=2, max_size=5), st.integers(1, 5))
def test_package_merge_is_optimal(weights: list[int], limit: int) -> None:
    if len(weights) > 1 << limit:
        return
    lengths = huffman.package_merge([(w, s) for s, w in enumerate(weights)], limit)
    assert max(lengths.values()) <= limit
    assert sum(2.0 ** -lengths[s] for s in range(len(weights))) == 1
    assert sum(w * lengths[s] for s, w in enumerate(weights)) == best_cost(weights, limit)


@given(st.lists(st.integers(3, 100), min_size=1, max_size=4), st.integers(3, 5))
def test_lengths_are_optimal_with_the_escape(weights: list[int], limit: int) -> None:
    histogram = np.zeros(256, np.int64)
    histogram[250 : 250 + len(weights)] = weights
    lengths = huffman.code_lengths(histogram, limit)
    cost = sum(w * int(lengths[250 + i]) for i, w in enumerate(weights)) + huffman.escape_length(lengths)
    assert cost == best_cost([*weights, 1], limit), "the escape counts as if it had occurred once"


# -- canonical codes ---------------------------------------------------------------------------------------------------


@given(histograms, limits)
def test_codes_are_canonical(histogram: np.ndarray, limit: int) -> None:
    """As in DEFLATE: read from the first bit on, codes ascend in the order of (length, symbol)."""
    lengths = huffman.code_lengths(histogram, limit)
    reversed_codes, full = huffman.codes(lengths)
    assert full[ESCAPE] == huffman.escape_length(lengths)
    coded = sorted((int(full[s]), s) for s in range(257) if full[s])
    texts = [format(int(reversed_codes[s]), f"0{n}b")[::-1] for n, s in coded]
    assert texts == sorted(texts)
    assert all(not b.startswith(a) for a, b in itertools.pairwise(texts)), "no code begins another"
    if coded:
        assert texts[0] == "0" * coded[0][0]
        assert texts[-1] == "1" * coded[-1][0]
    of_escape_length = [s for n, s in coded if n == full[ESCAPE]]
    assert not coded or of_escape_length[-1] == ESCAPE


@given(histograms, limits)
def test_the_table_finds_every_code(histogram: np.ndarray, limit: int) -> None:
    lengths = huffman.code_lengths(histogram, limit)
    reversed_codes, full = huffman.codes(lengths)
    symbol_of, length_of = huffman.decode_table(lengths)
    for state in range(256):
        symbol, length = int(symbol_of[state]), int(length_of[state])
        assert length == full[symbol]
        assert state & ((1 << length) - 1) == reversed_codes[symbol]


def test_deflate_example() -> None:
    """RFC 1951, 3.2.2: lengths (3,3,3,3,3,2,4,4) of A to H; here H is the escape."""
    lengths = np.zeros(256, np.uint8)
    lengths[:7] = (3, 3, 3, 3, 3, 2, 4)
    reversed_codes, full = huffman.codes(lengths)
    codes = [format(int(reversed_codes[s]), f"0{full[s]}b")[::-1] for s in (*range(7), ESCAPE)]
    assert codes == ["010", "011", "100", "101", "110", "00", "1110", "1111"]


@pytest.mark.parametrize(
    "lengths",
    [
        [1, 1],  # nothing is left for the escape
        [1, 1, 1],  # more than there is
        [2, 2, 3],  # 3/8 are left
        [9],
        [15],
        [8] * 256,
    ],
)
def test_incomplete_codes_are_corrupt(lengths: list[int]) -> None:
    table = np.zeros(256, np.uint8)
    table[: len(lengths)] = lengths
    with pytest.raises(Corrupt, match="code table"):
        huffman.unpack_table(huffman.pack_table(table))
    with pytest.raises(Corrupt, match="code table"):
        huffman.codes(table)


def test_the_prior_is_a_code() -> None:
    huffman.codes(np.array(PRIOR_LENGTHS, np.uint8))
