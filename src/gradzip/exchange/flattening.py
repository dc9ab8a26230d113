"""Tensors as flat ones, in the order in which their values lie in memory."""

from __future__ import annotations

import torch

from ..sensitivity.near import memory_order


def flatten(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """x's values in the order in which those of `like` lie in memory; a view where x lies that way too.

    Codecs see gradients and floors so. It is not row-major for channels_last or transposed parameters.
    """
    if x.is_contiguous() and like.is_contiguous():
        return x.view(-1)
    return x.permute(memory_order(like)).reshape(-1)


def unflatten(flat: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The inverse of `flatten`; a view."""
    if like.is_contiguous():
        return flat.view(like.shape)
    order = memory_order(like)
    back = sorted(range(like.dim()), key=order.__getitem__)
    return flat.view([like.shape[d] for d in order]).permute(back)
