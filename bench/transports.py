"""What Gloo from pinned memory and NCCL carry between ranks, for exchanges of the sizes that chunks have.

    gradzip emulate --gpu-share --hosts 4 --rate 10gbit -- python bench/transports.py --csv bench/results/transports.csv

Every rank sends as many bytes to each other one, as an all-to-all does; NCCL once by its collective for equal parts and
once by single messages of different sizes, as compressed parts are. The all-reduce is what compression competes with.
Times are medians, as slow as the slowest rank; data is compared once before it is timed.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

MEGABYTES = (0.25, 1, 2, 6, 20)
ALL_REDUCED = (26.2144, 262.144)
ROUNDS = 9


class Ways:
    """Ways to exchange `size` bytes with each other rank; rank r fills what it sends with r."""

    def __init__(self, size: int, gloo: dist.ProcessGroupGloo) -> None:
        self.rank, self.world, self.size, self._gloo, self._tag = dist.get_rank(), dist.get_world_size(), size, gloo, 0
        self.others = [i for i in range(self.world) if i != self.rank]
        self.sent = torch.full((self.world, size), self.rank, dtype=torch.uint8, device="cuda")
        self.received = torch.full_like(self.sent, self.rank)
        self._host = [torch.full((self.world, size), self.rank, dtype=torch.uint8).pin_memory() for _ in range(2)]

    def gloo(self) -> None:
        """By the host's memory, copies to and from the GPU included."""
        sent, received = self._host
        sent.copy_(self.sent)
        self._tag += 1
        works = [self._gloo.recv([received[i]], i, self._tag) for i in self.others]
        works += [self._gloo.send([sent[i]], i, self._tag) for i in self.others]
        for work in works:
            work.wait()
        self.received.copy_(received)

    def nccl_collective(self) -> None:
        dist.all_to_all_single(self.received, self.sent)

    def nccl_messages(self) -> None:
        """Rank r's are shorter by r steps of a thousandth."""
        less = self.size // 1000
        into = [(i, self.received[i, : self.size - less * i]) for i in self.others]
        out = [(i, self.sent[i, : self.size - less * self.rank]) for i in self.others]
        operations = [dist.P2POp(dist.irecv, part, i) for i, part in into]
        operations += [dist.P2POp(dist.isend, part, i) for i, part in out]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    def check(self, way: Callable[[], None]) -> None:
        self.received[self.others] = 255
        way()
        shortest = self.size - self.size // 1000 * self.world
        assert (self.received[:, :shortest] == torch.arange(self.world, device="cuda")[:, None]).all(), way


def median_ms(run: Callable[[], None], group: dist.ProcessGroup) -> float:
    for _ in range(2):
        run()
    times = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        dist.barrier(group=group)
        begin = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    slowest = torch.tensor(times)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    return 1e3 * statistics.median(slowest.tolist())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    torch.cuda.set_device(0)
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    own = dist.ProcessGroupGloo(PrefixStore("gloo", _get_default_store()), rank, world, timedelta(minutes=1))
    group = dist.new_group(backend="gloo")
    rows = []
    for megabytes in MEGABYTES:
        ways = Ways(int(1e6 * megabytes), own)
        for way in (ways.gloo, ways.nccl_collective, ways.nccl_messages):
            ways.check(way)
            rows.append((way.__name__, megabytes, int(1e6 * megabytes) * (world - 1), median_ms(way, group)))
    for megabytes in ALL_REDUCED:
        values = torch.zeros(int(1e6 * megabytes) // 4, device="cuda")
        sent = 2 * values.numel() * 4 * (world - 1) // world
        rows.append(("nccl_all_reduce", megabytes, sent, median_ms(lambda x=values: dist.all_reduce(x), group)))
    if rank == 0:
        fields = ("way", "megabytes", "sent_bytes", "ms", "gbit_per_s", "ranks", "device")
        table = [
            (way, size, sent, round(ms, 3), round(8e-6 * sent / ms, 2), world, torch.cuda.get_device_name())
            for way, size, sent, ms in rows
        ]
        for row in table:
            print("  ".join(f"{name}={value}" for name, value in zip(fields, row)), flush=True)
        if options.csv:
            with options.csv.open("w", newline="") as file:
                csv.writer(file).writerows([fields, *table])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
