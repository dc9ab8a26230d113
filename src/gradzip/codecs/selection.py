"""Which values of a tensor a sparse codec sends: the largest, those above a threshold, or random ones."""

from __future__ import annotations

import math

import numpy as np
import torch

from ..engines.cuda import pack_select
from .base import wide
from .random import Keys, bits_of, halves, keyed_bits

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_SAMPLE = 1 << 14  # values that a threshold is guessed from
_SEARCHED = 1 << 18  # values that a CPU compares at once, in its cache
_DRAWN = 1 << 14  # indices that are drawn at once: as many as stay in the cache from one operation to the next


def magnitudes(x: torch.Tensor) -> torch.Tensor:
    """Integers in the order of the values' magnitudes; NaN is larger than infinity."""
    kind = _INTEGERS[x.itemsize]
    return x.view(kind) & torch.iinfo(kind).max


def largest(x: torch.Tensor, k: int) -> torch.Tensor:
    """The ascending indices of the k values of largest magnitude; of equal ones the first, on every device.

    On a CPU rows are searched as well, each by itself.

    Selecting from many values is slow, so a threshold is guessed from a sample first, low enough that more than k
    values should reach it, as in Deep Gradient Compression (Lin et al., ICLR 2018). There the guess decides
    what is sent; here it only narrows the search, and where it proves too high all values are searched.
    """
    if k == x.shape[-1]:
        return torch.arange(k, device=x.device).expand(*x.shape[:-1], k)
    if x.dim() == 1 and x.numel() >= 4 * _SAMPLE and 8 * k <= x.numel():
        sample = magnitudes(x[:: x.numel() // _SAMPLE])
        expected = k * sample.numel() / x.numel()
        guess = sample.topk(math.ceil(expected + 3 * math.sqrt(expected) + 3), sorted=False).values.min()
        few = 2 * k + _SAMPLE
        likely = _reached(x, guess, few)
        if likely.numel() >= k:
            # Where most values are equal, as zeros are in an embedding's gradient, all of them may be likely.
            sorts = x.device.type != "cpu" and likely.numel() <= few
            return likely[(largest_by_sorting if sorts else _largest)(magnitudes(x[likely]), k)]
    return _largest(magnitudes(x), k)


def _reached(x: torch.Tensor, least: torch.Tensor, expected: int) -> torch.Tensor:
    """The ascending indices of magnitudes of at least `least`, most often no more than `expected` of them."""
    if pack_select.serves(x) and x.itemsize <= 4:
        found = pack_select.select_large(x, least, expected)
        if found is not None:
            return found
    if x.device.type != "cpu":
        return (magnitudes(x) >= least).nonzero().view(-1)
    starts = range(0, x.numel(), _SEARCHED)
    return torch.cat([(magnitudes(x[at : at + _SEARCHED]) >= least).nonzero().view(-1) + at for at in starts])


def _largest(magnitude: torch.Tensor, k: int) -> torch.Tensor:
    """As `largest`. torch.topk leaves open which of several equal values it takes."""
    if magnitude.dim() > 1:
        return _largest_of_rows(magnitude, k)
    limit = magnitude.topk(k, sorted=False).values.amin(-1, True)
    chosen = magnitude >= limit
    if magnitude.device.type != "cpu" or int(chosen.sum()) != k:
        chosen = _first_of_equals(magnitude, limit, k)
    return chosen.nonzero().view(-1)


def _largest_of_rows(magnitude: torch.Tensor, k: int) -> torch.Tensor:
    """The same on a CPU, where numpy finds the limits of short rows in a third of the time."""
    at = magnitude.shape[-1] - k
    limit = torch.from_numpy(np.partition(magnitude.numpy(), at)[..., at : at + 1].copy())
    chosen = magnitude >= limit
    too_many = (chosen.sum(-1) != k).nonzero().view(-1)
    if too_many.numel():
        chosen[too_many] = _first_of_equals(magnitude[too_many], limit[too_many], k)
    places = torch.from_numpy(np.flatnonzero(chosen.numpy())).view(-1, k)
    return places - magnitude.shape[-1] * torch.arange(len(places))[:, None]


def _first_of_equals(magnitude: torch.Tensor, limit: torch.Tensor, k: int) -> torch.Tensor:
    """Which are the k largest: of those equal to the least of them, the first."""
    above, equal = magnitude > limit, magnitude == limit
    room = k - above.sum(-1, True)
    return above | (equal & (equal.cumsum(-1) <= room))


def largest_by_sorting(magnitude: torch.Tensor, k: int) -> torch.Tensor:
    """The same in a quarter of the operations, and without waiting for a GPU; a CPU is slower at it."""
    return magnitude.sort(descending=True, stable=True).indices[:k].sort().values


def reaching(x: torch.Tensor, threshold: float) -> torch.Tensor:
    """The ascending indices of the values of at least that magnitude; NaN always counts as such."""
    return (~(wide(x).abs() < threshold)).nonzero().view(-1)


def sample(key: int, numel: int, k: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """k different indices below `numel`, ascending: a random one from each of k stretches of almost equal length.

    Also those lengths: one over the chance that each index had.
    """
    start, length = _stretches(numel, k, device)
    return start + (keyed_bits(key, start) * length >> 32), length


def samples(keys: Keys, numel: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`sample` for several keys, a row of indices for each, on the CPU."""
    start, length = _stretches(numel, k, torch.device("cpu"))
    drawn, rows = list[torch.Tensor](), max(1, _DRAWN // max(k, 1))
    for first in range(0, len(keys), rows):
        bits = bits_of(*halves(keys[first : first + rows]), start)
        drawn.append(start + (bits * length >> 32))
    return torch.cat(drawn), length


def _stretches(numel: int, k: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Where k stretches of almost equal length start, and their lengths."""
    bounds = torch.arange(k + 1, dtype=torch.int64, device=device) * numel // max(k, 1)
    return bounds[:-1], bounds.diff()


def block(key: int, numel: int) -> int:
    """Where a stretch of the tensor starts that wraps around at its end: anywhere with equal chance."""
    return int(keyed_bits(key, torch.zeros(1, dtype=torch.int64))) * numel >> 32


def blocks(keys: Keys, numel: int, k: int) -> torch.Tensor:
    """The k indices of such stretches for several keys, a row for each, on the CPU."""
    start = bits_of(*halves(keys), torch.zeros(1, dtype=torch.int64)) * numel >> 32
    index = start + torch.arange(k)
    return torch.where(index < numel, index, index - numel)
