"""Into how many chunks a tensor is best cut, and what carries them best: one exchange on GPUs, over Gloo and over NCCL.

    G='gradzip emulate --gpu-share --hosts 4 --rate 10gbit --'
    $G python bench/chunking.py --input gradient.pt --csv chunking.csv

Every way of cutting is measured as `gradzip bench net` does, verified first and beside native all-reduces. `1,2,1` are
three chunks, the middle one twice as long. With `--moments`, rank 0 also prints what its stages did when, in one
exchange of each.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from gradzip.bench import net
from gradzip.bench.sample import Sample
from gradzip.collectives import message
from gradzip.collectives.layout import Layout, Piece
from gradzip.option import Option

CUTS = "1;1,1;1,2,1;1,2,2,1;2,3,2,1"
CODECS = "gcomp:keep=7;gcomp:mode=lossless"
FIELDS = (
    "cut",
    "codec",
    "transport",
    "milliseconds",
    "spread",
    "ratio",
    "of_ideal",
    "bytes",
    "ranks",
    "network",
    "device",
)


def cut_by(weights: Sequence[float]) -> None:
    """From now on, messages of one tensor are cut in these proportions."""

    def chunks(sizes: Sequence[int], ranks: int, cuttable: bool, part: int = 0) -> list[Layout]:
        (size,) = sizes
        shares = [0.0, *itertools.accumulate(weights)]
        places = [round(size * share / shares[-1]) for share in shares]
        return [(Piece(0, a, b),) for a, b in itertools.pairwise(places)]

    message.chunks = chunks


def show_moments(bench: net.Bench, cut: str) -> None:
    for channel in bench._channels:
        way = bench._way(Option.parse("gcomp:keep=7"), channel)
        for _ in range(3):
            bench._time(way)
        channel.watch.record()
        begin = time.perf_counter()
        seconds = bench._time(way)
        if dist.get_rank() == 0:
            print(f"{cut} over {channel.transport}, {1e3 * seconds:.2f} ms")
            for moment in sorted(channel.watch.recorded(), key=lambda moment: moment.begin):
                first, last = 1e3 * (moment.begin - begin), 1e3 * (moment.end - begin)
                print(f"  {first:6.2f} {last:6.2f}  {moment.track}, {moment.name.partition(':')[0]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", type=Path, required=True)
    parser.add_argument("--values", type=int, default=6_553_600)
    parser.add_argument("--cuts", default=CUTS)
    parser.add_argument("--codecs", default=CODECS)
    parser.add_argument("--transport", default="gloo,nccl")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--moments", action="store_true")
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    first = dist.get_rank() == 0
    sample = net.sized(net.shared(Sample.load(options.input) if first else None), options.values)
    bench = net.Bench(sample, torch.device("cuda", 0), options.transport.split(","))
    rows = []
    for cut in options.cuts.split(";"):
        cut_by([float(weight) for weight in cut.split(",")])
        for result in bench.measure(options.codecs.split(";"), options.rounds):
            about = {"cut": cut, "network": os.environ.get("GRADZIP_NETWORK", "as it is")}
            rows.append(about | vars(result) | {"device": torch.cuda.get_device_name()})
            if first:
                print("  ".join(f"{name}={rows[-1][name]}" for name in FIELDS[:7]), flush=True)
        if options.moments:
            show_moments(bench, cut)
    if first and options.csv:
        with options.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, FIELDS, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
