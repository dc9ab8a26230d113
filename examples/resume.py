"""Checkpoint and resume: the handle is saved beside model and optimizer, because error feedback is part of the run.

    torchrun --nproc-per-node 2 examples/resume.py        # trains 10 steps and saves
    torchrun --nproc-per-node 2 examples/resume.py        # goes on from there

Two runs of 10 steps end with the same bits as one run of 20.
"""

import hashlib
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradzip


def main(folder: str = "checkpoint", steps: str = "10") -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    common, own = Path(folder) / "common.pt", Path(folder) / f"rank{rank}.pt"

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 1))
    first, saved = 0, None
    if common.exists():
        saved = torch.load(common, weights_only=True)
        first = saved["step"]
        net.load_state_dict(saved["model"])
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    handle = gradzip.attach(model, optimizer, "topk:ratio=0.05")
    if saved is not None:
        optimizer.load_state_dict(saved["optimizer"])
        # Each rank has its own residuals; one that is new, on more ranks than before, starts without.
        handle.resume(torch.load(own, weights_only=True) if own.exists() else None)

    for step in range(first, first + int(steps)):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1000 * step + rank))
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    own.parent.mkdir(exist_ok=True)
    torch.save(handle.state_dict(), own)
    if rank == 0:
        last = first + int(steps)
        torch.save({"step": last, "model": net.state_dict(), "optimizer": optimizer.state_dict()}, common)
        bits = b"".join(p.detach().numpy().tobytes() for p in net.parameters())
        print(f"steps {first} to {last}, parameters {hashlib.sha256(bits).hexdigest()[:16]}")
    dist.barrier()
    handle.detach()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
