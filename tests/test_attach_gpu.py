"""attach on models that lie on a GPU: two ranks share it."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import TIMEOUT, run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import same

import gradzip
from gradzip import Accordion, Fixed

LOSSY: dict[str, Any] = {
    "near": Fixed("gcomp:ulps=4096"),
    "near on the CPU": Fixed("gcomp:ulps=4096@cpu"),
    "topk": Fixed("topk:ratio=0.1"),
    "topk cpu": Fixed("topk:ratio=0.1,feedback=cpu"),
    "powersgd": "powersgd:rank=2",
    "accordion": Accordion("powersgd:rank=2", "powersgd:rank=1", window=2),
}


def trained(policy: Any, amp: bool = False, sync: bool = False) -> list[torch.Tensor]:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 32)).cuda()
    net = nn.SyncBatchNorm.convert_sync_batchnorm(net) if sync else net
    model = DistributedDataParallel(net, bucket_cap_mb=0.05)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda", enabled=amp)
    if policy is not None:
        gradzip.attach(model, optimizer, policy, scaler=scaler if amp else None, timeout=TIMEOUT)
    for step in range(5):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(10 * step + dist.get_rank())).cuda()
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16, enabled=amp):
            loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return [p.detach().cpu() for p in model.parameters()]


def on_a_gpu(rank: int) -> dict[str, Any]:
    del os.environ["GRADZIP_ENGINE"]  # the right one for each device
    torch.cuda.set_device(0)
    plain = trained(None)
    out: dict[str, Any] = {"plain": plain, "identity": trained(Fixed("identity"))}
    out["lossless"] = trained(Fixed("gcomp:mode=lossless"))
    out |= {name: trained(policy) for name, policy in LOSSY.items()}
    out["plain sync"] = trained(None, sync=True)
    out["lossless sync"] = trained(Fixed("gcomp:mode=lossless"), sync=True)
    out["amp"] = trained(Fixed("gcomp"), amp=True)
    return out


@pytest.fixture(scope="module")
def seen() -> list[dict[str, Any]]:
    return run_ranks(2, on_a_gpu, deadline=300)


@pytest.mark.gpu
@pytest.mark.timeout(320)
@pytest.mark.parametrize(
    ("name", "plain"), [("identity", "plain"), ("lossless", "plain"), ("lossless sync", "plain sync")]
)
def test_lossless_is_plain_ddp(seen: list[dict[str, Any]], name: str, plain: str) -> None:
    """Also with SyncBatchNorm, which communicates in the middle of backward."""
    assert all(same(found[name], found[plain]) for found in seen)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*LOSSY, "amp"])
def test_replicas_are_identical_and_near(seen: list[dict[str, Any]], name: str) -> None:
    first, second = (found[name] for found in seen)
    assert same(first, second)
    flat, plain = (torch.cat([p.flatten() for p in x]) for x in (first, seen[0]["plain"]))
    assert 0 < float((flat - plain).norm() / plain.norm()) < 0.2
