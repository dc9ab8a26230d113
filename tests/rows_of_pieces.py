"""Tensors as the rows that engines take where they code several at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from gradzip.engines import native
from gradzip.engines.native import Floors, Pieces

Tensors = Sequence[torch.Tensor]


def rows(tensors: Tensors, floors: Floors, lost: Tensors | None = None, exact: Sequence[bool] | None = None) -> Pieces:
    found = np.zeros(len(tensors), native.PIECE)
    found["values"], found["n"] = [x.data_ptr() for x in tensors], [x.numel() for x in tensors]
    for name, column in native.floor_columns(floors).items():
        found[name] = column
    if lost is not None:
        found["lost"] = [x.data_ptr() for x in lost]
    if exact is not None:
        found["exact"] = exact
    return found
