"""Features of training loops, two at a time: with each pair, lossless is plain DDP to the bit and replicas agree.

docs/compatibility.md is made from these lists (`python bench/make_compatibility.py`): it has a cell where there is a
test, and no other.
"""

from __future__ import annotations

import copy
import itertools
import logging
from contextlib import nullcontext
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from ranks import TIMEOUT, run_ranks
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from training import same

import gradzip
from gradzip import Fixed

FEATURES = ("autocast", "GradScaler", "accumulation", "clipping", "torch.compile", "Join", "checkpoint")
PAIRS = [f"{a} + {b}" for a, b in itertools.combinations(FEATURES, 2)]
CASES = ["DDP alone", *FEATURES, *PAIRS]
POLICIES = {
    "lossless": Fixed("gcomp:mode=lossless"),
    "near": Fixed("gcomp:ulps=4096"),
    "topk": Fixed("topk:ratio=0.1"),
    "noise": Fixed("noise"),
}
STEPS, HALF = 4, 2


class Training:
    """A model, its optimizer, its scaler and its handle, with some features in use."""

    def __init__(self, features: set[str], policy: Any, device: torch.device) -> None:
        self.features, self.device = features, device
        torch.manual_seed(3)
        net = nn.Sequential(nn.Linear(20, 48), nn.ReLU(), nn.Linear(48, 32)).to(device)
        self.ddp = DistributedDataParallel(net)
        compiled = "torch.compile" in features
        self.model: Any = torch.compile(self.ddp, backend="eager") if compiled else self.ddp
        self.optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        scaled = "GradScaler" in features
        self.scaler = torch.amp.GradScaler(device.type, init_scale=256.0, enabled=scaled)
        given = self.scaler if scaled else None
        self.handle: Any = None
        if policy is not None:
            self.handle = gradzip.attach(
                cast(nn.Module, self.model), self.optimizer, policy, scaler=given, timeout=TIMEOUT
            )

    def train(self, first: int, last: int) -> None:
        """Under Join, rank 0 has an input less in the end."""
        uneven = "Join" in self.features and dist.get_rank() == 0 and last == STEPS
        with Join([self.ddp]) if "Join" in self.features else nullcontext():
            for step in range(first, last - uneven):
                self.step(step)

    def step(self, step: int) -> None:
        self.optimizer.zero_grad()
        if "accumulation" in self.features:
            with self.ddp.no_sync():
                self.backward(100 + step)
        self.backward(step)
        self.scaler.unscale_(self.optimizer)
        if "clipping" in self.features:
            nn.utils.clip_grad_norm_(self.ddp.parameters(), 0.05)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def backward(self, number: int) -> None:
        generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
        x = torch.randn(8, 20, generator=generator).to(self.device)
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled="autocast" in self.features):
            loss = self.model(x).float().square().mean()
        self.scaler.scale(loss).backward()

    def state(self) -> dict[str, Any]:
        parts = {"model": self.ddp, "optimizer": self.optimizer, "scaler": self.scaler, "handle": self.handle}
        return {name: copy.deepcopy(part.state_dict()) for name, part in parts.items() if part is not None}

    def load(self, state: dict[str, Any]) -> None:
        self.ddp.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        if self.handle is not None:
            self.handle.load_state_dict(state["handle"])


def trained(features: set[str], policy: Any, device: torch.device) -> list[torch.Tensor]:
    run = Training(features, policy, device)
    run.train(0, HALF)
    if "checkpoint" in features:
        state = run.state()
        if run.handle is not None:
            run.handle.detach()
        run = Training(features, policy, device)
        run.load(state)
    run.train(HALF, STEPS)
    if run.handle is not None:
        run.handle.detach()
    return [p.detach().cpu() for p in run.ddp.parameters()]


def in_turn(rank: int, kind: str) -> dict[str, Any]:
    logging.getLogger("gradzip").setLevel(logging.WARNING)
    device = torch.device(kind, rank % torch.cuda.device_count()) if kind == "cuda" else torch.device(kind)
    found: dict[str, Any] = {}
    for case in CASES:
        features = set(case.split(" + ")) & set(FEATURES)
        plain = trained(features, None, device)
        found[case] = {"plain": plain} | {name: trained(features, one, device) for name, one in POLICIES.items()}
    return found


def check(seen: list[dict[str, Any]], case: str) -> None:
    first, second = (found[case] for found in seen)
    assert same(first["lossless"], first["plain"]), "lossless is not plain DDP to the bit"
    flat = torch.cat([p.flatten() for p in first["plain"]])
    for name in POLICIES:
        assert same(first[name], second[name]), f"replicas differ with {name}"
    for name in ("near", "topk"):
        ours = torch.cat([p.flatten() for p in first[name]])
        assert 0 < float((ours - flat).norm() / flat.norm()) < 0.2, name


@pytest.fixture(scope="module")
def over_gloo() -> list[dict[str, Any]]:
    return run_ranks(2, in_turn, "cpu", deadline=300)


@pytest.fixture(scope="module")
def over_nccl() -> list[dict[str, Any]]:
    return run_ranks(2, in_turn, "cuda", deadline=300, backend="nccl")


@pytest.mark.timeout(320)
@pytest.mark.parametrize("case", CASES)
def test_pair(over_gloo: list[dict[str, Any]], case: str) -> None:
    check(over_gloo, case)


@pytest.mark.gpu
@pytest.mark.timeout(320)
@pytest.mark.parametrize("case", CASES)
def test_pair_over_nccl(over_nccl: list[dict[str, Any]], case: str) -> None:
    check(over_nccl, case)
