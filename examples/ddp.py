"""Plain DistributedDataParallel with compressed gradients: two lines more than without.

torchrun --nproc-per-node 2 examples/ddp.py                        # the default: noise, as the optimizer is AdamW
torchrun --nproc-per-node 2 examples/ddp.py powersgd:rank=2        # any codec by its text form
gradzip report run.jsonl
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradzip
from gradzip.report import Recorder

STEPS = 20


def main(policy: str | None = None) -> None:
    dist.init_process_group("gloo")  # "cpu:gloo,cuda:nccl" for models on GPUs
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    handle = gradzip.attach(model, optimizer, policy)
    recorder = Recorder("run.jsonl", policy or "the default", handle)  # only if a report is wanted

    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        x = torch.randn(32, 64, generator=data)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        recorder(loss=loss.item())

    if dist.get_rank() == 0:
        stats = handle.stats()
        print(f"loss {loss.item():.3f} after {STEPS} steps, {stats['ratio']:.2f}x fewer bytes than FP32")
    handle.detach()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
