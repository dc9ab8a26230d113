"""Routes of the host runner on a GPU, which four ranks share: each must give exactly the mean.

    gradzip emulate --gpu-share --hosts 4 --rate 10gbit -- python bench/gpu_net.py
    gradzip emulate --gpu-share --hosts 4 --rate 10gbit -- gradzip bench net --device cuda --values 6553600,65536000

All 174 routes with coding on the GPU, and those with coding on the CPU. The ranks count as two hosts of two.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from gradzip.bench.net import Bench
from gradzip.bench.sample import Sample
from gradzip.option import Option
from gradzip.routes import tree

NUMEL = 100_003


def numbers(rank: int, device: torch.device) -> torch.Tensor:
    """Sums and means of these are exact in float32, in whatever order."""
    return ((torch.arange(NUMEL, device=device) * 7919 + rank * 104729) % 1000 * 4 - 2000).float()


def main() -> None:
    dist.init_process_group("cpu:gloo,cuda:nccl")
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    torch.cuda.set_device(0)
    device, rank, world = torch.device("cuda", 0), dist.get_rank(), dist.get_world_size()
    bench = Bench(Sample("exact", torch.ones(NUMEL)), device)
    bench.own.copy_(numbers(rank, device))
    mean = torch.stack([numbers(other, device) for other in range(world)]).sum(0) / world
    routes, wrong = dict.fromkeys([*tree(("gpu",)), *tree(("cpu",))]), []
    for route in routes:
        codec = "gcomp:mode=lossless" if route.compresses else "identity"
        bench.average(Option(codec, None, str(route)))
        if not torch.equal(bench.result, mean):
            wrong.append(str(route))
    print(f"rank {rank}: {len(routes) - len(wrong)} of {len(routes)} routes gave the mean", *wrong, sep="\n  ")
    dist.destroy_process_group()
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
