"""`gradzip report`: one HTML file about training runs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from .. import report
from ..errors import ReportError
from ..plan import Plan
from ..planner.profile import Profile
from ..report.measured import measured
from ..report.page import summary
from ..report.predicted import stories
from .table import Commands, add_json, command


def add(commands: Commands) -> None:
    parser = command(
        commands,
        "report",
        "one HTML file that shows what compression did to training runs",
        "gradzip report run.jsonl --plan plan.json --out report.html",
        "Reads what gradzip.report.Recorder wrote, of one run or of several to compare; the first one is the baseline. "
        "The file needs no network and opens in any browser.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run.jsonl; one file may hold several runs")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="adds the predicted timeline of a step")
    parser.add_argument("--plan", type=Path, metavar="FILE", help="adds the plan, and its timeline where --profile is")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="torch.profiler's: adds the measured timeline")
    parser.add_argument("--title", default="gradzip report", help="stands at the top")
    parser.add_argument("--out", type=Path, default=Path("report.html"), metavar="FILE", help="default: report.html")
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    runs = report.read(args.runs)
    plan = Plan.load(args.plan) if args.plan else None
    told = stories(Profile.load(args.profile), plan) if args.profile else []
    if args.trace:
        told.append(measured(args.trace))
    write(args.out, report.page(runs, title=args.title, plan=plan, stories=told))
    if args.json:
        print(json.dumps({"out": str(args.out), "rows": summary(runs)}, indent=2))
    else:
        print(f"{len(runs)} run{'s' * (len(runs) != 1)} in {args.out}")
    return 0


def write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise ReportError(f"cannot write {path}: {error.strerror}") from error
