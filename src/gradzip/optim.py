"""Optimizers that published compressors were evaluated with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch.optim.optimizer import Optimizer

from .errors import Unsupported

__all__ = ["EFMomentum"]


class EFMomentum(Optimizer):
    """SGD with momentum as in PowerSGD's Algorithm 2 (Vogels et al., NeurIPS 2019): error feedback comes first.

    The gradient d is what the ranks have agreed on. Weight decay is added to it here, so that it is never compressed:

        d = d + weight_decay * x
        m = momentum * m + d          in the first step m = d
        x = x - lr * (d + m)

    torch.optim.SGD takes lr * m, or with nesterov=True lr * (d + momentum * m). Of a gradient that stays the same, this
    one goes 2 - momentum times as far as the former in the long run.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        foreach: bool | None = None,
    ) -> None:
        for name, value in (("lr", lr), ("weight_decay", weight_decay)):
            if value < 0:
                raise Unsupported(f"{name}={value}: at least 0")
        if not 0 <= momentum < 1:
            raise Unsupported(f"momentum={momentum}: from 0 to below 1")
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "foreach": foreach})

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            gradients = [p.grad for p in parameters]
            if any(g.is_sparse for g in gradients):
                raise Unsupported("EFMomentum takes dense gradients: use Embedding(sparse=False)")
            # foreach is faster on GPUs and slower or equal on the CPU, as torch's own optimizers have it
            together = group["foreach"] if group["foreach"] is not None else all(p.is_cuda for p in parameters)
            (self._update_together if together else self._update_each)(group, parameters, gradients)
        return loss

    def _momenta(self, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
        for p in parameters:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        return [self.state[p]["momentum_buffer"] for p in parameters]

    def _update_each(
        self, group: dict[str, Any], parameters: list[torch.Tensor], gradients: list[torch.Tensor]
    ) -> None:
        for p, d, m in zip(parameters, gradients, self._momenta(parameters)):
            if group["weight_decay"]:
                d = d.add(p, alpha=group["weight_decay"])
            m.mul_(group["momentum"]).add_(d)
            p.add_(d, alpha=-group["lr"]).add_(m, alpha=-group["lr"])

    def _update_together(
        self, group: dict[str, Any], parameters: list[torch.Tensor], gradients: list[torch.Tensor]
    ) -> None:
        momenta = self._momenta(parameters)
        if group["weight_decay"]:
            gradients = list(torch._foreach_add(gradients, parameters, alpha=group["weight_decay"]))
        torch._foreach_mul_(momenta, group["momentum"])
        torch._foreach_add_(momenta, gradients)
        torch._foreach_add_(parameters, gradients, alpha=-group["lr"])
        torch._foreach_add_(parameters, momenta, alpha=-group["lr"])
