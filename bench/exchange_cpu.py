"""Processor time of an exchange: what each rank spends, user and system, whatever else keeps the machine busy.

    python bench/exchange_cpu.py --csv bench/results/exchange_cpu.csv

Ranks are processes over loopback, each verified like in `gradzip bench net` before it is measured.
"""

from __future__ import annotations

import argparse
import csv
import os
import resource
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from gradzip.bench import net
from gradzip.cli.samples import builtin
from gradzip.option import Option

CODECS = "gcomp:mode=lossless;gcomp;gcomp:keep=7;gcomp:ulps=256"


def spent() -> tuple[float, float]:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime, usage.ru_stime


def measure(rank: int, options: argparse.Namespace, store: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=options.ranks)
    bench = net.Bench(net.shared(builtin() if rank == 0 else None), torch.device("cpu"))
    codecs = [Option.parse(codec) for codec in options.codecs.split(";")]
    ways = [bench._native()[0], *(bench._way(codec, bench.channel) for codec in codecs)]
    rows = []
    for way in ways:
        bench._verify(way)
        seen = []
        for _ in range(options.rounds):
            bench.result.copy_(bench.own)
            dist.barrier()
            before, begun = spent(), time.perf_counter()
            way.run()
            seen.append([time.perf_counter() - begun, *(b - a for a, b in zip(before, spent()))])
        mean = torch.tensor([1e3 * statistics.median(column) for column in zip(*seen)])
        dist.all_reduce(mean)
        wall, user, system = (mean / options.ranks).tolist()
        rows.append(
            {
                "codec": way.name, "route": way.route, "bytes": bench.own.nbytes, "ranks": options.ranks,
                "user_ms": round(user, 1), "system_ms": round(system, 1), "processor_ms": round(user + system, 1),
                "wall_ms": round(wall, 1), "load": round(os.getloadavg()[0], 1),
            }
        )  # fmt: skip
        if rank == 0:
            print("  ".join(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
    if rank == 0 and options.csv:
        new = not options.csv.exists()
        with options.csv.open("a", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            if new:
                writer.writeheader()
            writer.writerows(rows)
    bench.channel.leave()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--codecs", default=CODECS, help="separated by ;")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--csv", type=Path, help="rows are appended")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, (options, f"{folder}/store"), options.ranks)


if __name__ == "__main__":
    main()
