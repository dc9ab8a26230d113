"""Measure, plan, train: whether compression pays is known before the long run.

    gradzip profile --steps 12 -- torchrun --nproc-per-node 2 examples/planned.py   # writes profile.json
    gradzip plan profile.json --hosts 2 --gpus-per-host 1 --inter 1gbit             # answers; writes plan.json
    torchrun --nproc-per-node 2 examples/planned.py plan.json                       # trains with it

Or leave all of that to the run itself: gradzip.attach(model, optimizer, "auto").
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradzip

STEPS = 20


def main(plan: str = "") -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 1024), nn.GELU(), nn.Linear(1024, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    handle = None
    if plan:
        chosen = gradzip.Plan.load(plan)
        handle = gradzip.attach(model, optimizer, chosen)

    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        x = torch.randn(32, 64, generator=data)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    if handle is not None:
        if dist.get_rank() == 0:
            used = sorted({str(option) for option in chosen.options.values()})
            print(f"loss {loss.item():.3f} with {', '.join(used)}: {handle.stats()['ratio']:.2f}x fewer bytes")
        handle.detach()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
