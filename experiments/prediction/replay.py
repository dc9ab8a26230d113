"""A training script for measurements: computing is replayed as sleeps, gradients are drawn once, all else is real.

So two cores are enough for four ranks, and what is measured is coding and sending. Run by every rank:

    gradzip emulate --hosts 4 --rate 1gbit -- python replay.py --model cnn --plans plain plan.json
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradzip

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "bench"))
from model_shapes import MODELS, Layer

FORWARD_S, BACKWARD_S = 0.10, 0.20
# Real architectures, narrowed so that a step at 100 Mbit/s takes seconds and not minutes.
SOURCES = {"cnn": ("resnet50", 2), "vgg": ("vgg16", 4), "gpt": ("gpt2", 4)}


def layers(model: str) -> list[Layer]:
    name, narrower = SOURCES[model]
    found = []
    for layer in MODELS[name]():
        shape = tuple(n // narrower if n >= 64 else n for n in layer.shape)
        found.append(Layer(layer.name.replace(".", "_"), shape, layer.work, layer.last))
    return found


class Sleep(torch.autograd.Function):
    """Costs time in backward, and hands out a gradient that was drawn before."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor, seconds: float
    ) -> torch.Tensor:
        ctx.gradient, ctx.seconds = gradient, seconds
        return x + 0.0

    @staticmethod
    def backward(ctx: Any, *grad: torch.Tensor) -> Any:
        time.sleep(ctx.seconds)
        return grad[0], ctx.gradient.clone(), None, None


class Replay(nn.Module):
    def __init__(self, model: str) -> None:
        super().__init__()
        table = layers(model)
        work = sum(layer.work for layer in table)
        rng = torch.Generator().manual_seed(7 + dist.get_rank())
        self.rows: list[tuple[str, torch.Tensor, float]] = []
        for layer in [*(x for x in table if x.last), *(x for x in table if not x.last)]:
            self.register_parameter(layer.name, nn.Parameter(torch.randn(layer.shape) * 0.05))
            scale = 1e-3 * torch.exp(torch.randn(layer.shape[:1], generator=rng)).view(
                -1, *[1] * (len(layer.shape) - 1)
            )
            gradient = torch.randn(layer.shape, generator=rng) * scale
            self.rows.append((layer.name, gradient, BACKWARD_S * layer.work / work))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(FORWARD_S)
        for name, gradient, seconds in self.rows:
            x = Sleep.apply(x, getattr(self, name), gradient, seconds)
        return x


def steps(model: str, plan: str, count: int) -> Iterator[tuple[float, float]]:
    """Seconds of each step, of the slowest rank, and those that a rank's processor worked, on average."""
    torch.manual_seed(1)
    net = DistributedDataParallel(Replay(model))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
    handle = None if plan == "plain" else gradzip.attach(net, optimizer, gradzip.Plan.load(plan))
    x = torch.ones(1, requires_grad=True)
    for _ in range(count):
        dist.barrier()
        begin, worked = time.perf_counter(), time.process_time()
        optimizer.zero_grad()
        net(x).sum().backward()
        optimizer.step()
        slowest = torch.tensor(time.perf_counter() - begin)
        mean = torch.tensor((time.process_time() - worked) / dist.get_world_size())
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        dist.all_reduce(mean)
        yield float(slowest), float(mean)
    if handle is not None:
        handle.detach()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", nargs="+", required=True)
    parser.add_argument("--plans", nargs="+", default=["plain"], help="plain, or MODEL is put for {} in a file's name")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for model in args.model:
        for plan in args.plans:
            times, worked = zip(*steps(model, plan.format(model), args.steps))
            if dist.get_rank() == 0:
                print(json.dumps({"model": model, "plan": plan, "step_s": times, "cpu_s": worked}), flush=True)
    dist.destroy_process_group()
