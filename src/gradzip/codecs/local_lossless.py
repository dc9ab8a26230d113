"""Which gradients of a rank's own, before they are summed, go lossless beside sums in near mode (`gcomp:own=auto`).

Gradients from BF16 or FP16 arithmetic have 8 or 11 bits of mantissa, which lossless coding finds; near mode goes by
what the optimizer can tell apart, which may be more. So a few values of the gradient are looked at, and the way is
taken that would send fewer bits of them. A frame says what it is: no rank has to know what another one has chosen.

What was found counts until the next look, and is part of the codec's state, so that a resumed run goes on with it. A
look waits for the GPU once for all tensors of a message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.functional import pad

from ..engines.layout import EXACT, Floor
from .base import Context

EVERY = 64  # steps between two looks; in the beginning, where gradients and rates change fast, at powers of two
SAMPLE = 1024  # values of a tensor, at equal distances
EXPONENT = 3  # bits that a coded exponent takes, about: the entropy in gradients is 2.4 to 3.0 (docs/format.md)
LOSSLESS = "own_lossless"  # in the state: 1 or 0


def find_lossless(
    xs: Sequence[torch.Tensor], contexts: Sequence[Context], states: Sequence[dict[str, Any]]
) -> list[bool]:
    """Whether each of these flat gradients goes lossless. `states` are theirs, from step to step."""
    looks = [i for i, (ctx, state) in enumerate(zip(contexts, states)) if LOSSLESS not in state or looks_at(ctx.step)]
    looks = [i for i in looks if xs[i].dtype == torch.float32 and contexts[i].floor is not None]
    for i, found in zip(looks, smaller_lossless([(xs[i], contexts[i].floor) for i in looks])):
        states[i][LOSSLESS] = int(found)
    return [bool(state.get(LOSSLESS)) for state in states]


def known_lossless(
    step: int, floors: Sequence[Floor | torch.Tensor | None], states: Sequence[Mapping[str, Any]]
) -> list[bool] | None:
    """What was found before; None: some gradients have to be looked at. A gradient without a floor never is."""
    if looks_at(step) or any(LOSSLESS not in state and floor is not None for state, floor in zip(states, floors)):
        return None
    return [bool(state.get(LOSSLESS)) for state in states]


def looks_at(step: int) -> bool:
    return step & (step - 1) == 0 or step % EVERY == 0


def smaller_lossless(gradients: Sequence[tuple[torch.Tensor, torch.Tensor | Floor | None]]) -> list[bool]:
    """Whether lossless coding sends fewer bits than near mode of flat float32 tensors with these floors."""
    found = [False] * len(gradients)
    samples = [(i, _sample(x, floor)) for i, (x, floor) in enumerate(gradients) if floor is not None and x.numel()]
    if samples:
        rows = _counts(torch.stack([x for _, (x, _) in samples]), torch.stack([grid for _, (_, grid) in samples]))
        for (i, _), row in zip(samples, rows):
            found[i] = _fewer(min(SAMPLE, gradients[i][0].numel()), *row)
    return found


def _sample(x: torch.Tensor, floor: torch.Tensor | Floor) -> tuple[torch.Tensor, torch.Tensor]:
    """The bits of values at equal distances, with their floors; zeros behind those of a small tensor."""
    distance = max(1, x.numel() // SAMPLE - 1 | 1)  # odd, or a matrix may show the same few columns in every row
    part = slice(0, SAMPLE * distance, distance)
    values = x[part].view(torch.int32)
    grid = floor[part].tensor() if isinstance(floor, Floor) else floor.reshape(-1)[part]
    return pad(values, (0, SAMPLE - values.numel())), pad(grid, (0, SAMPLE - grid.numel()))


def _counts(bits: torch.Tensor, grid: torch.Tensor) -> list[list[int]]:
    """What _fewer asks for, of each row. Infinities and NaN count as zeros: a step that has some is skipped."""
    exponent, significand = bits >> 23 & 255, bits & 0x7FFFFF | 0x800000
    there = (bits & 0x7FFFFFFF != 0) & (exponent < 255)
    depth = torch.where(grid == EXACT, 23, (exponent - 127 - grid).clamp(max=23))
    kept = there & (exponent > 0) & (depth >= 0)
    lowest = torch.where(there, significand & -significand, 0x800000).amin(1)
    sums = [there.sum(1), (bits == -(1 << 31)).sum(1), lowest, kept.sum(1), torch.where(kept, depth, 0).sum(1)]
    rows: list[list[int]] = torch.stack(sums, 1).tolist()
    return rows


def _fewer(size: int, there: int, negative_zeros: int, lowest: int, kept: int, depth: int) -> bool:
    """Of `size` values so many are `there`, that is not 0, with that lowest bit set in the significand of any.

    Near mode keeps so many, with `depth` bits of mantissa in all. As docs/format.md has it, a zero takes a bit in
    a dense block; lossless blocks send the same bits of each value, and of zeros if one of them is negative; sparse
    blocks send positions, and exponents in unary.
    """
    width = 25 - lowest.bit_length()  # sign and mantissa
    lossless = EXPONENT * there + width * (size if negative_zeros else there) + size - there
    dense = (EXPONENT + 1) * kept + depth + size - kept
    sparse = (5 + (size // max(kept, 1)).bit_length() - 1) * kept + 2 * depth
    return lossless < min(dense, sparse)
