"""A training run, seen between backward and step: where a gradient exchange would meet its gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

WARM_UP = 20  # steps


@dataclass(frozen=True)
class Moment:
    step: int  # the step about to be taken, from 1
    loss: float
    optimizer: Optimizer  # its parameters have gradients

    def parameters(self) -> list[torch.Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def gradient(self) -> torch.Tensor:
        """All gradients as one flat tensor, in parameter order."""
        return flat(p.grad for p in self.parameters() if p.grad is not None)


def flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat([t.detach().reshape(-1) for t in tensors])


def train(optimizer: Optimizer, loss_of_batch: Callable[[], torch.Tensor], steps: int) -> Iterator[Moment]:
    """Trains with warm-up and cosine decay to a tenth of the optimizer's learning rate; yields before every step."""
    peak = [group["lr"] for group in optimizer.param_groups]
    for step in range(1, steps + 1):
        factor = min(1.0, step / WARM_UP) * (0.1 + 0.9 * (1 + math.cos(math.pi * step / steps)) / 2)
        for group, lr in zip(optimizer.param_groups, peak):
            group["lr"] = lr * factor
        loss = loss_of_batch()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        yield Moment(step, loss.item(), optimizer)
        optimizer.step()
