"""Embeddings with sparse gradients under attach: torch averages them, as plain DDP does."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import TIMEOUT, run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import same

import gradzip
from gradzip import Fixed, Policy
from gradzip.exchange.peers.gloo import with_one_thread

POLICIES: dict[str, str | Policy] = {
    "identity": Fixed("identity"),
    "lossless": Fixed("gcomp:mode=lossless"),
    "near": "gcomp",
    "topk": "topk:ratio=0.1",
    "powersgd": "powersgd:rank=2",
}
EXACT = ("identity", "lossless")


class Net(nn.Module):
    """Embeddings first, in the middle and last in backward: DDP gives each a bucket of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 40, sparse=True)
        self.hidden = nn.Linear(40, 64)
        self.bags = nn.EmbeddingBag(30, 64, sparse=True, mode="sum")
        self.out = nn.Linear(64, 40)
        self.last = nn.Embedding(20, 40, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.words(x % 50).sum(1)
        x = self.hidden(x).relu() + self.bags((x[:, :3].long() % 30).abs())
        return self.out(x) * self.last(torch.arange(x.shape[0]) % 20)


def train(policy: str | Policy | None, rank: int, only_embeddings: bool = False) -> dict[str, Any]:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Embedding(50, 8, sparse=True)) if only_embeddings else Net()
    model = DistributedDataParallel(net, bucket_cap_mb=0.005)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    handle = None if policy is None else gradzip.attach(model, optimizer, policy, timeout=TIMEOUT)
    for step in range(6):
        rng = torch.Generator().manual_seed(10 * step + rank)
        optimizer.zero_grad()
        model(torch.randint(50, (8, 5), generator=rng)).square().mean().backward()
        optimizer.step()
    stats = None if handle is None else handle.stats()
    if handle is not None:
        handle.detach()
    return {"parameters": [p.detach().clone() for p in model.parameters()], "stats": stats}


def compared(rank: int, name: str) -> dict[str, Any]:
    logging.getLogger("gradzip").setLevel(logging.WARNING)
    plain, ours = train(None, rank), train(POLICIES[name], rank)
    embeddings = train(None, rank, True), train(POLICIES[name], rank, True)
    return {
        "same": same(plain["parameters"], ours["parameters"]),
        "embeddings": same(*(run["parameters"] for run in embeddings)),
        "parameters": ours["parameters"],
        "stats": ours["stats"],
    }


@pytest.mark.parametrize("check", ["", "1"])
@pytest.mark.parametrize("name", POLICIES)
def test_sparse_embeddings_train_as_with_plain_ddp(name: str, check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADZIP_CHECK", check)
    found = run_ranks(2, compared, name, backend="gloo of one thread")
    for result in found:
        assert result["same"] or name not in EXACT
        assert result["embeddings"]
        assert same(result["parameters"], found[0]["parameters"]), "replicas differ"
        assert result["stats"]["steps"] == 6
        assert "sparse gradients by torch" in result["stats"]["codecs"]
        assert all(bool(p.isfinite().all()) for p in result["parameters"])


def many_at_once(rank: int) -> int:
    """Sums that end together: with two threads for them, this process often dies here."""
    group, done = with_one_thread(dist.HashStore(), 0, 1, timedelta(seconds=30)), 0
    for _ in range(500):
        works = [group.allreduce([torch.sparse_coo_tensor([[0]], [1.0], (4,))]) for _ in range(200)]  # type: ignore[arg-type]
        for work in works:
            work.wait()
        done += len(works)
    return done


def test_many_sparse_sums_at_once() -> None:
    assert run_ranks(1, many_at_once) == [100_000]
