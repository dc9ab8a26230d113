"""`gradzip emulate`: a command on several emulated hosts."""

from __future__ import annotations

import argparse
import json
import sys

from .. import emulate
from ..emulate import Line, Rates, Result, format_rate
from ..errors import EmulationError
from .table import Commands, add_json, command

_REACHED = 0.8  # of the limit; TCP leaves 0.957 of it, so below this the machine is the bottleneck


def add(commands: Commands) -> None:
    parser = command(
        commands,
        "emulate",
        "run a command on several emulated hosts, as torchrun would",
        "gradzip emulate --hosts 4 --rate 1gbit -- python train.py",
        "Each host is a network namespace of this machine with an address and a network card of its own, limited to "
        "the rate in both directions; the command runs once per rank with torchrun's environment variables. Needs "
        "Linux with iproute2, and root or user namespaces. Output is prefixed with [host.rank]. The first rank that "
        "fails ends all others 5 seconds later, and its exit code is returned.",
    )
    parser.add_argument("--hosts", type=int, default=4, metavar="N", help="how many (default: 4)")
    parser.add_argument("--ranks-per-host", type=int, default=1, metavar="N", help="processes on each (default: 1)")
    limit = parser.add_mutually_exclusive_group()
    limit.add_argument("--rate", default="1gbit", help="of each host, each way: 100mbit, 2.5gbit (default: 1gbit)")
    limit.add_argument(
        "--no-limit", action="store_true", help="plain processes on the loopback: no namespaces, no limit, no root"
    )
    parser.add_argument("--no-measure", action="store_true", help="do not measure the rate between hosts first")
    share = "several NCCL ranks on one GPU, through CUDA MPS where it is installed"
    parser.add_argument("--gpu-share", action="store_true", help=share)
    add_json(parser)
    parser.add_argument("argv", nargs=argparse.REMAINDER, metavar="-- command ...", help="what every rank runs")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    argv = args.argv[1:] if args.argv[:1] == ["--"] else args.argv
    if not argv:
        raise EmulationError("there is no command to run: gradzip emulate --hosts 4 -- python train.py")
    shape = f"{args.hosts} hosts with {args.ranks_per_host} rank{'s' * (args.ranks_per_host > 1)} each"
    rate = None if args.no_limit else emulate.parse_rate(args.rate)
    result = emulate.run(
        argv,
        hosts=args.hosts,
        rate=rate,
        ranks_per_host=args.ranks_per_host,
        gpu_share=args.gpu_share,
        measure=not args.no_measure,
        on_line=_to_stderr if args.json else Line.print,
        on_ready=lambda rates: print(f"gradzip: {shape}, {_describe(rate, rates)}", file=sys.stderr, flush=True),
    )
    if result.first_failure is not None:
        host = result.cluster.host_of(result.first_failure)
        said = f"rank {result.first_failure} on host {host} failed first, with exit code {result.exit_code}"
        print(f"gradzip: {said}", file=sys.stderr)
    if args.json:
        print(json.dumps(_row(result), indent=2))
    return result.exit_code


def _to_stderr(line: Line) -> None:
    print(line, file=sys.stderr, flush=True)


def _describe(rate: int | None, rates: Rates | None) -> str:
    text = "no limit" if rate is None else f"{format_rate(rate)} each way"
    if rates is None:
        return text
    mean = sum(rates.ring) / len(rates.ring)
    text += f"; measured {format_rate(rates.one_flow)} for one flow, {format_rate(mean)} for each in a ring of hosts"
    if rate is not None and mean < _REACHED * rate:
        text += ". With all hosts busy the limit is not reached: take times for those of a slower network"
    return text


def _row(result: Result) -> dict[str, object]:
    cluster, rates = result.cluster, result.rates
    return {
        "hosts": cluster.hosts,
        "ranks_per_host": cluster.ranks_per_host,
        "rate_bps": cluster.rate,
        "measured_flow_bps": rates and round(rates.one_flow),
        "measured_ring_bps": rates and [round(rate) for rate in rates.ring],
        "seconds": round(result.seconds, 3),
        "exit_code": result.exit_code,
        "first_failure": result.first_failure,
        "exit_codes": list(result.codes),
    }
