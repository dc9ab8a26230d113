"""How the time to decode depends on the entropy of the exponents: gradzip's decoder, a table look-up, a tree walk.

All decode the same exponents into float32 values. Every time is CPU time of one thread on one core; the decoders and
a plain copy of as many bytes take turns, the best of each counts, and what is reported is the ratio to the copy.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import gradzip
from gradzip.bench.codec import one_core
from gradzip.codecs import Context
from gradzip.engines import huffman
from gradzip.engines.layout import ESCAPE

SOURCE = Path(__file__).with_name("walk.cpp")
VALUES = 1 << 23  # 32 MB of float32
CENTRE = 110  # a usual exponent of gradients
LOSSLESS = "gcomp:mode=lossless"


@dataclass
class Speed:
    """Times are multiples of the time of a plain copy."""

    entropy: float  # bits per exponent
    code_bits: float  # mean length of the plain Huffman code
    gradzip: float  # values that have nothing but their exponent
    gradzip_mantissas: float  # the same exponents with random signs and mantissas
    look_up: float
    walk: float


def exponents(bits: float, rng: np.random.Generator) -> np.ndarray:
    """Normally distributed exponents (VALUES,) uint8 of that entropy."""
    steps = np.arange(-60, 61)
    low, high = 0.05, 40.0
    for _ in range(60):
        width = (low * high) ** 0.5
        shares = np.exp(-(steps**2) / (2 * width**2))
        shares /= shares.sum()
        there = shares[shares > 0]
        if -(there * np.log2(there)).sum() < bits:
            low = width
        else:
            high = width
    return (CENTRE + rng.choice(steps, VALUES, p=shares)).astype(np.uint8)


@contextmanager
def decoders() -> Iterator[ctypes.CDLL]:
    """walk.cpp, built for the occasion."""
    compiler = shutil.which("c++")
    if compiler is None:
        raise SystemExit("the comparison with a tree walk needs a C++ compiler: install one that is called c++")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "walk.so"
        subprocess.run([compiler, "-std=c++17", "-O3", "-shared", "-fPIC", str(SOURCE), "-o", str(library)], check=True)
        loaded = ctypes.CDLL(str(library))
        loaded.pack.restype = ctypes.c_size_t
        yield loaded


class _Plain:
    """One Huffman stream of exponents, to be decoded by walk.cpp."""

    def __init__(self, library: ctypes.CDLL, symbols: np.ndarray) -> None:
        counts = np.bincount(symbols, minlength=256)
        items = [(int(counts[s]), int(s)) for s in np.flatnonzero(counts)]
        lengths = np.zeros(256, np.uint8)
        # One leaf more than there are symbols, as in gradzip's books, so that the codes can be made the same way.
        for symbol, length in huffman.package_merge([*items, (1, ESCAPE)], huffman.MAX_LENGTH).items():
            if symbol != ESCAPE:
                lengths[symbol] = length
        self.codes, self.lengths = (np.ascontiguousarray(a) for a in huffman.codes(lengths))
        self.mean_bits = float((counts * lengths).sum() / counts.sum())
        self.compiled, self.out = library, np.zeros(symbols.size, np.uint32)
        self.stream = np.zeros(symbols.size + 16, np.uint8)
        library.pack(*self._pointers(symbols, symbols.size), self.stream.ctypes.data_as(ctypes.c_void_p))
        for decode in (self.walk, self.look_up):
            self.out[:] = 0
            decode()
            assert (self.out >> 23 == symbols).all()

    def walk(self) -> None:
        self.compiled.walk(*self._pointers(self.stream, self.out.size), self.out.ctypes.data_as(ctypes.c_void_p))

    def look_up(self) -> None:
        self.compiled.look_up(*self._pointers(self.stream, self.out.size), self.out.ctypes.data_as(ctypes.c_void_p))

    def _pointers(self, data: np.ndarray, size: int) -> tuple[object, ...]:
        arrays = [a.ctypes.data_as(ctypes.c_void_p) for a in (data, self.codes, self.lengths)]
        return arrays[0], ctypes.c_size_t(size), arrays[1], arrays[2]


def _frame(bits: np.ndarray) -> Callable[[], object]:
    """A decoder of these float32 values, checked once."""
    x = torch.from_numpy(bits.view(np.float32))
    codec, context = gradzip.parse(LOSSLESS), Context()
    payload, back = codec.encode(x, context), torch.zeros_like(x)
    codec.decode(payload, context, out=back)
    assert torch.equal(back.view(torch.int32), x.view(torch.int32))
    return lambda: codec.decode(payload, context, out=back)


def measure(entropies: tuple[float, ...] = (1, 2, 3, 4, 5), rounds: int = 9) -> list[Speed]:
    rng = np.random.default_rng(0)
    source, target = (np.zeros(VALUES, np.uint32) for _ in range(2))
    source += 1  # a page that was never written is not memory
    jobs: list[tuple[float, float, list[Callable[[], object]]]] = []
    with decoders() as library, one_core():
        for bits in entropies:
            symbols = exponents(bits, rng)
            plain = _Plain(library, symbols)
            bare = symbols.astype(np.uint32) << 23
            full = bare | rng.integers(1 << 23, size=VALUES, dtype=np.uint32)
            full |= rng.integers(2, size=VALUES, dtype=np.uint32) << 31
            decode = [lambda: np.copyto(target, source), _frame(bare), _frame(full), plain.look_up, plain.walk]
            jobs.append((bits, plain.mean_bits, decode))
        best = np.full((len(jobs), 5), np.inf)
        for _ in range(rounds):
            for i, (_, _, decode) in enumerate(jobs):
                for j, job in enumerate(decode):
                    start = time.thread_time()
                    job()
                    best[i, j] = min(best[i, j], time.thread_time() - start)
    copy = best[:, 0].min()
    return [Speed(bits, length, *(best[i, 1:] / copy)) for i, (bits, length, _) in enumerate(jobs)]
