"""Floors and reaches of a paired run: gradzip's own, for all tensors at once.

gradzip asks an optimizer of torch about each of its parameters. The one that is made here has whole rows for
parameters, which hold all tensors of a run (noise.Layout), and refers to the state that the run keeps in rows as well.
It answers for the run's own optimizer, and never steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

import gradzip

from .noise import Layout


class RowOptimizer:
    def __init__(
        self, layout: Layout, kind: type[Optimizer], values: torch.Tensor, state: Mapping[str, torch.Tensor],
        decay: float, **settings: Any,
    ) -> None:  # fmt: skip
        """`values` and each of `state` are rows (N,), which the run keeps up to date. Vectors have no weight decay."""
        matrices = torch.tensor([len(shape) > 1 for shape in layout.shapes], device=layout.device)
        self._layout, self._is_matrix, self._state = layout, layout.each_value(matrices), dict(state)
        # The same values twice, as a parameter of either group: what differs is the weight decay alone.
        self._matrices, self._vectors = values.view(-1), values.view(-1)
        groups = [
            {"params": [self._matrices], "weight_decay": decay},
            {"params": [self._vectors], "weight_decay": 0.0},
        ]
        self._optimizer: Optimizer = kind(groups, **settings)  # type: ignore[call-arg]

    def begin_step(self, rate: float, updates: int) -> None:
        """Says at which rate the coming step is taken, and how many were before it: torch has no state until then."""
        for group in self._optimizer.param_groups:
            group["lr"] = rate
            for row in group["params"]:
                if updates:
                    self._optimizer.state[row] = self._state | {"step": float(updates)}

    def floors(self, ulps: float) -> torch.Tensor | None:
        """(N,) int8 of near mode; none where nothing may be changed. Weight decay has no part in them."""
        rule = gradzip.rules(self._optimizer, ulps)[self._matrices]
        return None if rule is None else rule.tensor()

    def reaches(self) -> torch.Tensor:
        """(N,) float32 of paper mode."""
        found = gradzip.reaches(self._optimizer)
        matrices, vectors = (self._layout.in_blocks(found[row]) for row in (self._matrices, self._vectors))
        return torch.where(self._is_matrix, matrices, vectors).view(-1)
