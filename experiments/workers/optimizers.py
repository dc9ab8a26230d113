"""Lion and Shampoo as published, by the keys of state that their common versions have."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.optim import Optimizer


class Lion(Optimizer):
    """Chen et al., Symbolic discovery of optimization algorithms (NeurIPS 2023)."""

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            stepped = [p for p in group["params"] if p.grad is not None]
            if not stepped:
                continue
            for p in stepped:
                if not self.state[p]:
                    self.state[p]["exp_avg"] = torch.zeros_like(p)
            gradients = [p.grad for p in stepped]
            averages = [self.state[p]["exp_avg"] for p in stepped]
            first, second = group["betas"]
            torch._foreach_mul_(stepped, 1 - group["lr"] * group["weight_decay"])
            updates = torch._foreach_lerp(gradients, averages, first)
            torch._foreach_sign_(updates)
            torch._foreach_add_(stepped, updates, alpha=-group["lr"])
            torch._foreach_lerp_(averages, gradients, 1 - second)


class Shampoo(Optimizer):
    """Gupta et al., Shampoo: Preconditioned stochastic tensor optimization (ICML 2018)."""

    def __init__(self, parameters: Iterable[torch.Tensor], lr: float = 0.1, epsilon: float = 1e-4) -> None:
        super().__init__(parameters, {"lr": lr, "epsilon": epsilon})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state, update = self.state[p], p.grad
                state.setdefault("step", 0)
                for dimension, size in enumerate(p.shape):
                    key = f"precond_{dimension}"
                    if key not in state:
                        state[key] = group["epsilon"] * torch.eye(size, device=p.device)
                    matrix = p.grad.transpose(0, dimension).reshape(size, -1)
                    state[key] += matrix @ matrix.T
                    values, vectors = torch.linalg.eigh(state[key])
                    root = vectors * values.clamp(min=1e-12) ** (-1 / (2 * p.dim())) @ vectors.T
                    update = torch.tensordot(root, update, ([1], [dimension])).movedim(0, dimension)
                state["step"] += 1
                p.add_(update, alpha=-group["lr"])
