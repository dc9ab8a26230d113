"""A small training run on DDP, for the tests that need one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from conftest import same_bits
from ranks import TIMEOUT
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradzip
from gradzip import Fixed, Handle, Policy, Rules

POLICIES: dict[str, str | Policy] = {
    "identity": Fixed("identity"),
    "identity-early": Fixed("identity/allgather"),
    "lossless": Fixed("gcomp:mode=lossless"),
    "near": "gcomp",
    "near-4096": Fixed("gcomp:ulps=4096"),
    "paper": "gcomp:mode=paper",
    "cast": "cast",
    "noise": "noise",
    "randomk": Fixed("randomk:ratio=0.1"),
    "topk": Fixed("topk:ratio=0.05"),
    "powersgd": "powersgd:rank=1",
    "powersgd-all": Fixed("powersgd:rank=2"),
    "mixed": Rules({"0.*": "powersgd:rank=2", "2.*": "topk:ratio=0.1", "4.*": "gcomp"}),
}


@dataclass
class Run:
    model: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    handle: Handle | None = None

    def step(self, number: int, poison: float | None = None) -> None:
        rng = torch.Generator().manual_seed(1000 * number + dist.get_rank())
        x = torch.randn(8, 20, generator=rng)
        self.optimizer.zero_grad()
        loss = self.model(x).square().mean()
        if poison is not None and dist.get_rank() == 1:
            loss = loss * poison
        loss.backward()

    def train(self, first: int, last: int) -> None:
        for number in range(first, last):
            self.step(number)
            self.optimizer.step()

    def gradients(self) -> list[torch.Tensor]:
        return [p.grad.clone() for p in self.model.parameters() if p.grad is not None]

    def parameters(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]


def start(policy: str | Policy | None, saved: dict[str, Any] | None = None) -> Run:
    """A run at its beginning, or where it was saved. Small buckets, so that there are several."""
    torch.manual_seed(7)
    net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 32))
    if saved:
        net.load_state_dict(saved["model"])
    model = DistributedDataParallel(net, bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if saved:
        optimizer.load_state_dict(saved["optimizer"])
    run = Run(model, optimizer)
    if policy is not None:
        run.handle = gradzip.attach(model, optimizer, policy, timeout=TIMEOUT)
        if saved:
            run.handle.load_state_dict(saved["handle"])
    return run


def save(run: Run) -> dict[str, Any]:
    assert run.handle is not None
    return {
        "model": run.model.module.state_dict(),
        "optimizer": run.optimizer.state_dict(),
        "handle": run.handle.state_dict(),
    }


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(same_bits(x, y) for x, y in zip(a, b))
