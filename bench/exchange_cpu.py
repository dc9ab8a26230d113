"""Processor time of an exchange: what each rank spends, user and system, whatever else keeps the machine busy.

    python bench/exchange_cpu.py --csv bench/results/exchange_cpu.csv
    python bench/exchange_cpu.py --model 1000x32x32 --csv bench/results/exchange_cpu.csv

Ranks are processes over loopback. By default the captured gradient is exchanged as one tensor, each codec verified like
in `gradzip bench net` before it is measured. With `--model`, what is measured is backward of a DDP model of that many
tensors, whose gradients need no computation; `native` is DDP without gradzip.
"""

from __future__ import annotations

import argparse
import csv
import functools
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradzip
from gradzip.bench import net
from gradzip.cli.samples import builtin
from gradzip.option import Option

CODECS = "gcomp:mode=lossless;gcomp;gcomp:keep=7;gcomp:ulps=256;noise;int8;topk:ratio=0.01;sign;powersgd:rank=4"
WARM_UP = 3  # rounds before those that count

Case = tuple[dict[str, object], Callable[[], object], Callable[[], None]]  # what it is, what comes before, the round


class Measured:
    """What rounds took; a system that samples whose time it is says less about the two kinds than about their sum."""

    def __init__(self) -> None:
        self._rounds: list[tuple[float, float]] = []
        self._user = self._system = 0.0

    @contextmanager
    def round(self) -> Iterator[None]:
        before, spent, began = resource.getrusage(resource.RUSAGE_SELF), time.process_time(), time.perf_counter()
        yield
        self._rounds.append((time.process_time() - spent, time.perf_counter() - began))
        after = resource.getrusage(resource.RUSAGE_SELF)
        self._user += after.ru_utime - before.ru_utime
        self._system += after.ru_stime - before.ru_stime

    def row(self) -> dict[str, float]:
        """Means over all ranks of the medians, in milliseconds."""
        processor, wall = (1e3 * statistics.median(column) for column in zip(*self._rounds))
        system = processor * self._system / ((self._user + self._system) or 1.0)
        mean = torch.tensor([processor - system, system, processor, wall])
        dist.all_reduce(mean)
        names = ("user_ms", "system_ms", "processor_ms", "wall_ms")
        return {name: round(float(value), 1) for name, value in zip(names, mean / dist.get_world_size())}


class Ready(torch.autograd.Function):
    """Hands gradients to tensors, without computing anything."""

    @staticmethod
    def forward(ctx: Any, gradients: list[torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return tensors[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *outputs: torch.Tensor) -> Any:
        return (None, *ctx.gradients)


class Tensors(nn.Module):
    """`count` parameters of one shape, whose gradients are the same in every step."""

    def __init__(self, count: int, shape: list[int], values: torch.Tensor) -> None:
        super().__init__()
        flat = values.repeat(-(-count * torch.Size(shape).numel() // values.numel()))
        self.gradients = [part.view(shape) for part in flat.split(torch.Size(shape).numel())[:count]]
        self.tensors = nn.ParameterList(torch.zeros(shape) for _ in range(count))

    def forward(self) -> torch.Tensor:
        loss: torch.Tensor = Ready.apply(self.gradients, *self.tensors)
        return loss


def exchange(options: argparse.Namespace) -> Iterator[Case]:
    """The captured gradient, as one tensor."""
    bench = net.Bench(net.shared(builtin() if dist.get_rank() == 0 else None), torch.device("cpu"))
    codecs = [Option.parse(codec) for codec in options.codecs.split(";")]
    for way in [bench._native()[0], *(bench._way(codec) for codec in codecs)]:
        bench._verify(way)
        named = {"codec": way.name, "route": way.route, "bytes": bench.own.nbytes}
        yield named, functools.partial(bench.result.copy_, bench.own), way.run
    bench.channel.leave()


def forward(model: nn.Module, losses: list[torch.Tensor]) -> None:
    model.zero_grad(set_to_none=False)
    losses.append(model())


def backward(losses: list[torch.Tensor]) -> None:
    losses.pop().backward()


def step(options: argparse.Namespace) -> Iterator[Case]:
    """Backward of a model of many tensors."""
    count, *shape = map(int, options.model.split("x"))
    sample = net.shared(builtin() if dist.get_rank() == 0 else None)
    rng = torch.Generator().manual_seed(1000 + dist.get_rank())
    values = sample.values * torch.rand(sample.values.numel(), generator=rng).add_(0.5)
    for codec in ["native", *options.codecs.split(";")]:
        model = DistributedDataParallel(Tensors(count, shape, values))
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        handle = None if codec == "native" else gradzip.attach(model, optimizer, codec)
        losses = list[torch.Tensor]()  # the last one is that of the next round
        named = {"codec": "native fp32" if handle is None else codec, "route": options.model}
        yield (
            named | {"bytes": 4 * count * torch.Size(shape).numel()},
            functools.partial(forward, model, losses),
            functools.partial(backward, losses),
        )
        if handle is not None:
            handle.detach()


def measure(rank: int, options: argparse.Namespace, store: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=options.ranks)
    rows = []
    for named, before, run in step(options) if options.model else exchange(options):
        measured = Measured()
        for number in range(WARM_UP + options.rounds):
            before()
            dist.barrier()
            if number < WARM_UP:
                run()
                continue
            with measured.round():
                run()
        rows.append({**named, "ranks": options.ranks, **measured.row(), "load": round(os.getloadavg()[0], 1)})
        if rank == 0:
            print("  ".join(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
    if rank == 0 and options.csv:
        new = not options.csv.exists()
        with options.csv.open("a", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            if new:
                writer.writeheader()
            writer.writerows(rows)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--codecs", default=CODECS, help="separated by ;")
    parser.add_argument("--model", metavar="COUNTxSHAPE", help="a DDP model of so many tensors, such as 1000x32x32")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--csv", type=Path, help="rows are appended")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, (options, f"{folder}/store"), options.ranks)


if __name__ == "__main__":
    main()
