"""`gradzip bench net`: what an exchange takes on this network. Every rank runs it; rank 0 prints."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist

from .. import __version__
from ..bench import net as net_bench
from ..bench.net import Bench, Result
from ..bench.sample import Sample
from ..errors import Unsupported
from .samples import append_csv, builtin, count
from .table import Column, Commands, Row, add_json, command, number, show

DEFAULT_OPTIONS = "noise;gcomp:mode=lossless;gcomp;gcomp:ulps=256;gcomp:keep=7;cast;cast/allreduce"

_COLUMNS = (
    Column("codec", "codec"),
    Column("route", "route"),
    Column("megabytes", "MB", number(1), right=True),
    Column("milliseconds", "time\nms", number(1), right=True),
    Column("algorithm_gbps", "algbw\nGB/s", number(3), right=True),
    Column("bus_gbps", "busbw\nGB/s", number(3), right=True),
    Column("effective_gbps", "effective\nGB/s", number(3), right=True),
    Column("host_megabytes", "sent by\na host, MB", number(1), right=True),
    Column("ratio", "ratio", number(3), right=True),
    Column("speedup", "speed-up", number(2, "x"), right=True),
    Column("of_ideal", "time /\n(fp32 / ratio)", number(2), right=True),
    Column("wrong", "wrong", number(0), right=True),
)


def add(kinds: Commands) -> None:
    parser = command(
        kinds,
        "net",
        "time of gradient exchanges on this network",
        "gradzip emulate --hosts 4 --rate 1gbit -- gradzip bench net --codecs 'gcomp:mode=lossless;topk/allgather'",
        "Runs on every rank of a job: start it by torchrun on a cluster, or by `gradzip emulate`. Verifies each "
        "exchange, then times it beside native all-reduces in FP32 and BF16, of the same rounds.",
    )
    parser.add_argument("--input", type=Path, metavar="FILE", help="a gradient: .npy or raw float32, or a .pt snapshot")
    parser.add_argument(
        "--values", metavar="N,N", help="use N values, for each N; a gradient that has fewer is repeated (default: all)"
    )
    parser.add_argument(
        "--codecs", metavar="A;B;C", help=f"codecs, or options with routes (default: {DEFAULT_OPTIONS})"
    )
    parser.add_argument(
        "--rounds", type=count, default=net_bench.ROUNDS, metavar="N", help="median of N (default: %(default)s)"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="where the gradients lie (default: cuda if there)")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="also append the rows to FILE")
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if "RANK" not in os.environ:
        raise Unsupported(
            "bench net measures between ranks: start it by `torchrun --nproc-per-node 4 -m gradzip bench net`, or on "
            "emulated hosts by `gradzip emulate --hosts 4 --rate 1gbit -- gradzip bench net`"
        )
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    try:
        return _measure(args, device)
    finally:
        dist.destroy_process_group()


def _measure(args: argparse.Namespace, device: torch.device) -> int:
    first = dist.get_rank() == 0
    sample = net_bench.shared(Sample.load(args.input) if args.input else builtin()) if first else net_bench.shared(None)
    sizes = [int(size) for size in args.values.split(",")] if args.values else [sample.values.numel()]
    options = [option for option in (args.codecs or _default(device)).split(";") if option.strip()]
    results: list[Result] = []
    for size in sizes:
        bench = Bench(net_bench.sized(sample, size), device)
        results += bench.measure(options, args.rounds)
    cards: list[dict[str, str]] = [{}] * dist.get_world_size()
    dist.all_gather_object(cards, net_bench.identity_card(__version__))
    pairs = net_bench.pair_bandwidths()
    if not first:
        return 0
    rows = [row(result) for result in results]
    if args.csv:
        network = os.environ.get("GRADZIP_NETWORK", "as it is")
        common = {"network": network, "device": device.type, "engine": cards[0]["engine"], "sample": sample.name}
        append_csv(args.csv, [common | row for row in rows])
    hosts = results[0].hosts
    title = (
        f"{len(cards)} ranks on {hosts} host{'s' * (hosts > 1)}, {sample.name}; {cards[0]['engine']} on {device.type}"
    )
    if args.json:
        print(json.dumps({"title": title, "rows": rows, "pairs_bps": pairs, "ranks": cards}, indent=2))
        return 0
    rates = [rate / 1e6 for line in pairs for rate in line if rate]
    notes = net_bench.differences(cards) or ["all ranks agree on versions and engines"]
    notes.append(f"from rank to rank: {min(rates):.0f} to {max(rates):.0f} Mbit/s" if rates else "one rank alone")
    show(title, _COLUMNS, rows, notes)
    if len(cards) > 1:
        _show_pairs(pairs)
    return 0


def _default(device: torch.device) -> str:
    """noise travels from the host's memory here: on GPUs its exchange is timed by training steps."""
    return DEFAULT_OPTIONS if device.type == "cpu" else DEFAULT_OPTIONS.removeprefix("noise;")


def row(result: Result) -> Row:
    derived = {"megabytes": result.bytes / 1e6, "host_megabytes": result.host_sent / 1e6}
    return dataclasses.asdict(result) | derived


def _show_pairs(pairs: list[list[float]]) -> None:
    columns = [Column("from", "from"), *(Column(f"to{i}", f"to {i}", number(0), right=True) for i in range(len(pairs)))]
    rows: list[Row] = [
        {"from": f"rank {i}"} | {f"to{j}": rate / 1e6 if rate else None for j, rate in enumerate(line)}
        for i, line in enumerate(pairs)
    ]
    show("Mbit/s from rank to rank", columns, rows)
