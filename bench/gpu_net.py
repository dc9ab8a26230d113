"""Exchanges of gradients on a GPU: routes first, then times. Needs one GPU, which four ranks share.

    gradzip emulate --gpu-share --hosts 4 --rate 10gbit -- python bench/gpu_net.py
    gradzip emulate --gpu-share --hosts 4 --rate 10gbit -- gradzip bench net --device cuda --values 6553600,65536000

All 174 routes with coding on the GPU, and one of each pattern of coding on CPU and GPU, must give exactly the mean. The
four ranks count as two hosts of two.
"""

from __future__ import annotations

import os
import threading

import torch
import torch.distributed as dist

from gradzip.codecs import Context, parse
from gradzip.collectives import Message, open_channel, submit
from gradzip.exchange.outcome import Outcome
from gradzip.feedback import Memory
from gradzip.routes import CODING, Route, tree

NUMEL = 100_003


def patterns() -> list[Route]:
    """One route for each sequence of devices that the tree's routes code on."""
    found: dict[tuple[str, ...], Route] = {}
    for route in tree():
        found.setdefault(tuple(step.where for step in route.steps if step.kind in CODING), route)
    return list(found.values())


def numbers(rank: int, device: torch.device) -> torch.Tensor:
    """Sums and means of these are exact in float32, in whatever order."""
    return ((torch.arange(NUMEL, device=device) * 7919 + rank * 104729) % 1000 * 4 - 2000).float()


def main() -> None:
    dist.init_process_group("gloo")
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    device = torch.device("cuda", 0)
    world = dist.group.WORLD
    assert world is not None
    channel = open_channel(world, device)
    mean = torch.stack([numbers(rank, device) for rank in range(channel.world)]).sum(0) / channel.world
    routes = dict.fromkeys([*tree(("gpu",)), *patterns()])
    memory, wrong = Memory(channel.rank), []
    for step, route in enumerate(routes):
        codec = parse("gcomp:mode=lossless" if route.compresses else "identity")
        values, done, ended = numbers(channel.rank, device), threading.Event(), list[Outcome]()
        context = Context("x", step, rank=channel.rank, world=channel.world)
        torch.cuda.synchronize()

        def end(outcome: Outcome, ended: list[Outcome] = ended, done: threading.Event = done) -> None:
            ended.append(outcome)
            done.set()

        submit(Message(codec, str(route), [values], [context], memory), channel, end)
        done.wait()
        if ended[0].error is not None:
            raise ended[0].error
        if not torch.equal(values, mean):
            wrong.append(str(route))
    print(f"rank {channel.rank}: {len(routes) - len(wrong)} of {len(routes)} routes gave the mean", *wrong, sep="\n  ")
    dist.destroy_process_group()
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
