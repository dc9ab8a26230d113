"""Code lengths from histograms on the GPU, where they are made apart from encoding; encoding makes its own."""

from __future__ import annotations

import torch

from ..huffman import MAX_LENGTH, MIN_SHARE
from ..layout import ESCAPE


def code_lengths(histograms: torch.Tensor, limit: int = MAX_LENGTH) -> torch.Tensor:
    """Code lengths for each row of (segments, 256) counts: `huffman.code_lengths` for all rows at once.

    Package-merge, run backwards: of a level's sorted list a prefix is chosen, so that counting the leaves in it says
    which symbols grow by one bit and how long the prefix of the level below is.
    """
    counts = histograms.to(torch.int64)
    segments = counts.shape[0]
    total = counts.sum(1, keepdim=True)
    never = torch.iinfo(torch.int64).max // 4
    places = (1 << limit) - 1  # the escape needs one as well
    by_count = torch.sort(counts, dim=1, descending=True, stable=True)
    coded = (by_count.values > 0) & (by_count.values * MIN_SHARE >= total)
    coded[:, places:] = False
    escaped = (total[:, 0] - torch.where(coded, by_count.values, 0).sum(1)).clamp(min=1)

    # Leaves in the order of (weight, symbol); what has no code sorts last.
    weights = torch.full((segments, 257), never, dtype=torch.int64, device=counts.device)
    weights.scatter_(1, by_count.indices, torch.where(coded, by_count.values, never))
    weights[:, ESCAPE] = escaped
    leaves = torch.sort(weights, dim=1, stable=True)
    levels = [torch.ones_like(leaves.values, dtype=torch.bool)]  # for each level: is the n-th item a leaf?
    level = leaves.values
    for _ in range(limit - 1):
        paired = level[:, : level.shape[1] // 2 * 2].view(segments, -1, 2).sum(2).clamp(max=never)
        merged = torch.sort(torch.cat([leaves.values, paired], 1), dim=1, stable=True)
        level = merged.values
        levels.append(merged.indices < 257)
    chosen = 2 * coded.sum(1)  # 2n - 2 of the n = coded + 1 leaves
    lengths = torch.zeros_like(weights)
    for is_leaf in reversed(levels):
        prefix = torch.arange(is_leaf.shape[1], device=counts.device) < chosen[:, None]
        taken = (is_leaf & prefix).sum(1)
        lengths += torch.arange(257, device=counts.device) < taken[:, None]
        chosen = 2 * (chosen - taken)
    by_symbol = torch.zeros_like(lengths).scatter_(1, leaves.indices, lengths)
    return by_symbol[:, :ESCAPE].to(torch.uint8)
