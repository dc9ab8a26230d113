"""`gradzip profile`: measures a training script as it is, for `gradzip plan`."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
from pathlib import Path

from ..codecs import parse
from ..emulate import parse_rate
from ..errors import PlanError
from ..planner import inject_folder
from ..planner.measure import DEFAULT_CODECS, VARIABLE, WARM, Settings
from .table import Commands, command


def add(commands: Commands) -> None:
    parser = command(
        commands,
        "profile",
        "measure a training script for `gradzip plan`, without changing it",
        "gradzip profile -- torchrun --nproc-per-node 4 train.py",
        "Runs the command; in every rank the first DistributedDataParallel model and its optimizer are watched. After "
        "a few steps codecs and collectives are measured on the script's own gradients and ranks; after --steps steps "
        "rank 0 writes the profile and the script ends. On several nodes run the same line on each. Ctrl-C keeps what "
        "was measured.",
    )
    parser.add_argument("--steps", type=int, default=50, metavar="N", help="optimizer steps to run (default: 50)")
    parser.add_argument("--out", type=Path, default=Path("profile.json"), metavar="FILE", help="default: profile.json")
    parser.add_argument(
        "--codec",
        action="append",
        metavar="C",
        help=f"measure this codec; may be repeated (default: {', '.join(DEFAULT_CODECS)})",
    )
    parser.add_argument("--inter", metavar="RATE", help="what the network between hosts is called: 25gbit")
    parser.add_argument("--keep-going", action="store_true", help="let the script go on after the profile is written")
    parser.add_argument("argv", nargs=argparse.REMAINDER, metavar="-- command ...", help="how the script is started")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    argv = args.argv[1:] if args.argv[:1] == ["--"] else args.argv
    if not argv:
        raise PlanError("there is no command to run: gradzip profile -- torchrun --nproc-per-node 4 train.py")
    least = WARM + 4
    if args.steps < least:
        raise PlanError(f"--steps {args.steps}: the first ones do not count, so give at least {least}")
    settings = Settings(
        args.steps,
        str(args.out.resolve()),
        tuple(str(parse(text)) for text in args.codec or DEFAULT_CODECS),
        None if args.inter is None else float(parse_rate(args.inter)),
        args.keep_going,
    )
    path = os.pathsep.join([str(inject_folder()), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, VARIABLE: settings.to_text()}
    try:
        process = subprocess.Popen(argv, env=environment)
    except OSError as error:
        raise PlanError(f"cannot run {argv[0]!r}: {error.strerror}") from error
    while True:
        try:
            code = process.wait()
            break
        except KeyboardInterrupt:  # the ranks get it as well, and write what they have
            signal.signal(signal.SIGINT, signal.SIG_IGN)
    return code if code >= 0 else 128 - code
