"""`gradzip plan`: will compression help, how much, with what, and what bandwidth is needed?"""

from __future__ import annotations

import argparse
import csv
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..emulate import format_rate, parse_rate
from ..errors import EmulationError, PlanError
from ..planner import models, perfetto
from ..planner.answer import LEAST_GAIN, Answer, Point, Request, answer, best_bucket, break_even, sweep
from ..planner.choices import Limits
from ..planner.network import Topology
from ..planner.profile import Profile
from ..planner.units import DDP_BUCKET
from .progress import Progress
from .table import Column, Commands, Row, add_json, command, number, show

_MOST_ROWS = 40
_STEPS = 13  # of a sweep over rates
_MB = 1 << 20

_UNITS = (
    Column("unit", "gradients", wrap=True),
    Column("tensors", "tensors", right=True),
    Column("mb", "MB", number(2), right=True),
    Column("ready_ms", "ready\nms", number(1), right=True),
    Column("option", "what it does", wrap=True),
    Column("link_ms", "link\nms", number(2), right=True),
    Column("coding_ms", "coding\nms", number(2), right=True),
    Column("why", "why", wrap=True),
)
_BASELINES = (
    Column("name", "strategy"),
    Column("step_ms", "step ms", number(1), right=True),
    Column("speed", "of FP32's speed", number(2, "x"), right=True),
    Column("note", "", wrap=True),
)
_SWEEP = (
    Column("hosts", "hosts", right=True),
    Column("inter", "between hosts"),
    Column("plain_ms", "FP32 ms", number(1), right=True),
    Column("bf16_ms", "BF16 ms", number(1), right=True),
    Column("plan_ms", "plan ms", number(1), right=True),
    Column("free_ms", "bound ms", number(1), right=True),
    Column("speedup", "speed-up", number(2, "x"), right=True),
    Column("plain_efficiency", "FP32\nefficiency", number(2), right=True),
    Column("efficiency", "plan's\nefficiency", number(2), right=True),
    Column("compressed", "compressed", lambda share: f"{100 * share:.0f}%", right=True),
)


def add(commands: Commands) -> None:
    parser = command(
        commands,
        "plan",
        "whether, how and how much compression helps a model on a cluster",
        "gradzip plan profile.json --hosts 8 --gpus-per-host 8 --inter 25gbit",
        "Plans from a profile that `gradzip profile` measured, or from one that ships: "
        f"{', '.join(models.names())}. Writes plan.json for gradzip.attach(model, optimizer, gradzip.Plan.load(…)).",
    )
    parser.add_argument("profile", help="profile.json, or the name of a model that ships")
    parser.add_argument("--hosts", type=int, metavar="N", help="hosts (default: as in the profile)")
    parser.add_argument("--gpus-per-host", type=int, metavar="N", help="ranks on each (default: as in the profile)")
    parser.add_argument("--inter", metavar="RATE", help="of a host's network card: 25gbit (default: as in the profile)")
    parser.add_argument("--intra", metavar="RATE", help="between ranks of a host (default: as in the profile)")
    parser.add_argument(
        "--cores-per-rank",
        type=float,
        metavar="N",
        help="less than 1 where ranks share cores (default: as in the profile)",
    )
    parser.add_argument("--codec", action="append", metavar="C", help="offer this codec; may be repeated")
    parser.add_argument("--lossy", action="store_true", help="offer all codecs of the profile, whatever they lose")
    parser.add_argument("--lossless", action="store_true", help="offer codecs that lose nothing only")
    parser.add_argument("--max-encodes", type=int, metavar="K", help="encode a value at most K times on its way")
    parser.add_argument(
        "--bucket-mb", default="25", metavar="MB", help="DDP's bucket_cap_mb, `auto` to choose it, or `tensor`"
    )
    parser.add_argument("--what-if", metavar="W", help="sweep: inter=1gbit..400gbit, or hosts=1..4096")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the table of a sweep to FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw a sweep (needs matplotlib)")
    parser.add_argument("--perfetto", type=Path, metavar="FILE", help="write the predicted timeline as a Chrome trace")
    parser.add_argument("--out", type=Path, default=Path("plan.json"), metavar="FILE", help="default: plan.json")
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    request = _request(args)
    if args.what_if:
        return _what_if(args, request)
    with Progress() as say:
        if args.bucket_mb == "auto":
            say("looking for the best bucket size")
            request = replace(request, bucket_bytes=best_bucket(request)[0] << 20)
        say("looking for the best plan")
        found = answer(request)
        say("looking for the bandwidth below which compression pays")
        limit = break_even(request) if request.limits.offered(request.profile) else None
    plan = found.to_plan()
    plan.save(args.out)
    if args.perfetto:
        perfetto.save(args.perfetto, {"predicted": found.spans()})
    if args.json:
        print(json.dumps(_json(found, limit, args.out), indent=2))
    else:
        _print(found, limit, args.out)
    return 0


def _request(args: argparse.Namespace) -> Request:
    shipped = args.profile in models.names() and not Path(args.profile).exists()
    profile = models.load(args.profile) if shipped else Profile.load(args.profile)
    if args.cores_per_rank is not None:
        if not 0 < args.cores_per_rank < math.inf:
            raise PlanError(f"--cores-per-rank {args.cores_per_rank}: give a number above 0")
        profile = replace(profile, cores_per_rank=args.cores_per_rank)
    topology = Topology(
        profile.hosts if args.hosts is None else args.hosts,
        profile.ranks_per_host if args.gpus_per_host is None else args.gpus_per_host,
        _rate(args.inter),
        _rate(args.intra),
    )
    swept = args.what_if or ""
    if topology.hosts == 1 and (args.inter or swept.startswith("inter")):
        given = f"--inter {args.inter}" if args.inter else f"--what-if {swept}"
        raise PlanError(
            f"{given}: this is a cluster of one host, and nothing goes between hosts. Give --hosts N for more of them, "
            "or --intra RATE for the ranks of one"
        )
    codecs = tuple(args.codec) if args.codec else None
    limits = Limits(codecs, lossy=args.lossy, max_encodes=args.max_encodes, lossless=args.lossless)
    limits.offered(profile)
    return Request(profile, topology, limits, _bucket_bytes(args.bucket_mb))


def _bucket_bytes(text: str) -> int | None:
    if text == "tensor":
        return None
    if text == "auto":
        return DDP_BUCKET
    try:
        size = float(text)
    except ValueError:
        size = 0.0
    if not 0 < size < 1e6:
        raise PlanError(f"--bucket-mb {text}: give a number of megabytes, `auto` or `tensor`")
    return int(size * _MB)


def _rate(text: str | None) -> float | None:
    try:
        return None if text is None else float(parse_rate(text))
    except EmulationError as error:
        raise PlanError(str(error)) from error


# -- one answer ------------------------------------------------------------------------------------------------------


def verdict(found: Answer, limit: float | None) -> list[str]:
    """The answer in words."""
    step, off = found.step_s * 1e3, 100 * found.uncertainty
    measured = "computed" not in found.request.profile.origin.get("collectives", "")
    doubt = (
        f" ± {off:.1f} %" if measured else " (uncertainty unknown: this profile's network was computed, not measured)"
    )
    lines = []
    if found.pays:
        over = found.speedup_over("BF16")
        than = f", {over:.2f}x BF16's" if over is not None else ""
        lines.append(
            f"compress: a step of {step:.1f} ms{doubt}, {1 + found.gain:.2f}x FP32's speed{than}; "
            f"{found.timeline.exposed_s * 1e3:.1f} ms of it are exchange that is not hidden"
        )
    else:
        lines.append(_why_not(found) + ("" if measured else "; the network was computed, not measured"))
    pays = "pays" if found.pays else "is predicted to pay"
    if limit is None:
        lines.append("no bandwidth is low enough for compression to pay with these codecs")
    elif math.isinf(limit):
        lines.append(f"compression {pays} at any bandwidth up to 3.2 Tbit/s")
    else:
        where = "inside the host" if found.request.topology.hosts == 1 else "between hosts"
        lines.append(f"compression {pays} (by more than 1 %) below about {format_rate(limit)} {where}")
    return lines


def _why_not(found: Answer) -> str:
    """Why plain all-reduce is written, and what could be done about it."""
    gain = f"{100 * found.gain:.1f} % faster than plain all-reduce ({found.plain_s * 1e3:.1f} ms)"
    if found.gain <= LEAST_GAIN:
        steps = f"{found.step_s * 1e3:.1f} ms a step, and plain all-reduce {found.plain_s * 1e3:.1f} ms"
        return f"do not compress: the best plan would take {steps}" + (", not 1 % more" if found.gain > 0 else "")
    if found.needed > found.crowding:
        return (
            f"do not compress yet: the best plan is predicted to be {gain}, but predictions may be off by "
            f"{100 * found.uncertainty:.1f} % ({found.doubt}), and no gain below twice that can be promised. "
            "Profile again with more steps, on a quiet machine and network"
        )
    return (
        f"do not compress: the best plan is predicted to be {gain}, but ranks share processor cores here, and waiting "
        f"for them may cost up to {100 * found.crowding:.1f} %. Give ranks more cores, or try it: "
        'gradzip.attach(model, optimizer, "auto") measures and goes back if it is slower'
    )


def _notes(found: Answer, limit: float | None, out: Path) -> list[str]:
    profile = found.request.profile
    notes = [f"assumed: {text}" for text in found.assumptions]
    notes += [f"{what}: {text}" for what, text in profile.origin.items() if "computed" in text]
    bound = found.baselines[-1].step_s
    if bound:
        notes.append(f"{100 * (found.step_s / bound - 1):.1f} % slower than if compression were free")
    what = "the plan is" if found.pays else "plain all-reduce for all gradients is"
    notes.append(f"found in {found.found.search_s * 1e3:.0f} ms; {what} in {out}")
    return notes


def _unit_rows(found: Answer) -> list[Row]:
    return [
        {
            "unit": str(u.unit),
            "tensors": len(u.unit.tensors),
            "mb": u.unit.raw_bytes / 1e6,
            "ready_ms": u.unit.ready_s * 1e3,
            "option": str(u.option),
            "link_ms": u.sent_s * 1e3,
            "coding_ms": u.coded_s * 1e3,
            "why": u.why,
        }
        for u in found.explain()
    ]


def _baseline_rows(found: Answer) -> list[Row]:
    rows: list[Row] = [
        {
            "name": b.name,
            "step_ms": None if b.step_s is None else b.step_s * 1e3,
            "speed": None if b.step_s is None else found.plain_s / b.step_s,
            "note": b.note,
        }
        for b in found.baselines
    ]
    name = "this plan" if found.pays else "best plan (not written)"
    plan: Row = {"name": name, "step_ms": found.step_s * 1e3, "speed": found.plain_s / found.step_s, "note": ""}
    return [*rows, plan]


def _title(request: Request) -> str:
    topology = request.topology
    rate = topology.inter_bits_per_s or getattr(request.profile.links.get("inter"), "bits_per_s", None)
    links = f", {format_rate(rate)} between hosts" if rate and topology.hosts > 1 else ""
    size = request.profile.size_bytes / 1e6
    return f"{request.profile.model}, {size:.0f} MB, on {topology.hosts} x {topology.ranks_per_host}{links}"


def _print(found: Answer, limit: float | None, out: Path) -> None:
    rows = sorted(_unit_rows(found), key=lambda row: -row["mb"])
    cut = [f"{len(rows) - _MOST_ROWS} smaller ones are not shown: see {out}"] if len(rows) > _MOST_ROWS else []
    print(_title(found.request))
    for line in verdict(found, limit):
        print(f"  {line}")
    show("what each gradient does", _UNITS, rows[:_MOST_ROWS], cut)
    show("compared", _BASELINES, _baseline_rows(found), _notes(found, limit, out))


def _json(found: Answer, limit: float | None, out: Path) -> dict[str, Any]:
    return {
        "title": _title(found.request),
        "pays": found.pays,
        "step_s": found.step_s,
        "uncertainty": found.uncertainty,
        "fp32_step_s": found.plain_s,
        "speedup_fp32": found.plain_s / found.step_s,
        "speedup_bf16": found.speedup_over("BF16"),
        "break_even_bits_per_s": None if limit is None or math.isinf(limit) else limit,
        "pays_at_any_rate": limit is not None and math.isinf(limit),
        "exposed_s": found.timeline.exposed_s,
        "search_s": found.found.search_s,
        "rows": _unit_rows(found),
        "baselines": _baseline_rows(found),
        "verdict": verdict(found, limit),
        "notes": _notes(found, limit, out),
        "plan": str(out),
    }


# -- sweeps ----------------------------------------------------------------------------------------------------------


def settings(text: str, topology: Topology) -> list[Topology]:
    """The clusters of `inter=1gbit..400gbit` or `hosts=1..4096`."""
    match = re.fullmatch(r"(inter|hosts)=(.+?)\.\.(.+)", text.strip())
    if match is None:
        raise PlanError(f"cannot read --what-if {text!r}: write inter=1gbit..400gbit or hosts=1..4096")
    what, low_text, high_text = match.groups()
    if what == "inter":
        low, high = _rate(low_text), _rate(high_text)
        assert low is not None and high is not None
        if not low < high:
            raise PlanError(f"--what-if {text!r}: the second rate must be above the first")
        return [topology.at(low * (high / low) ** (i / (_STEPS - 1))) for i in range(_STEPS)]
    if not (low_text.isdecimal() and high_text.isdecimal() and 1 <= int(low_text) < int(high_text)):
        raise PlanError(f"--what-if {text!r}: give two numbers of hosts, the second above the first")
    counts, hosts = [], int(low_text)
    while hosts < int(high_text):
        counts.append(hosts)
        hosts *= 2
    counts.append(int(high_text))
    return [replace(topology, hosts=n) for n in counts if n * topology.ranks_per_host > 1]


def _what_if(args: argparse.Namespace, request: Request) -> int:
    with Progress() as say:
        say(f"planning for {args.what_if}")
        points = sweep(request, settings(args.what_if, request.topology))
    rows = [_point_row(point) for point in points]
    if args.csv:
        with args.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    if args.plot:
        _plot(args.plot, points, _title(request), args.what_if.startswith("inter"))
    show(_title(request), _SWEEP, rows, as_json=args.json)
    return 0


def _point_row(point: Point) -> Row:
    return {
        "hosts": point.hosts,
        "inter": format_rate(point.inter_bits_per_s),
        "inter_bits_per_s": round(point.inter_bits_per_s),
        "plain_ms": point.plain_s * 1e3,
        "bf16_ms": None if point.bf16_s is None else point.bf16_s * 1e3,
        "plan_ms": point.plan_s * 1e3,
        "free_ms": point.free_s * 1e3,
        "speedup": point.plain_s / point.plan_s,
        "plain_efficiency": point.plain_efficiency,
        "efficiency": point.efficiency,
        "compressed": point.compressed_share,
    }


def _plot(path: Path, points: list[Point], title: str, rates: bool) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlanError("--plot needs matplotlib: pip install 'gradzip[plots]'") from error
    x = [p.inter_bits_per_s / 1e9 if rates else p.hosts for p in points]
    figure = Figure(figsize=(10, 4), layout="constrained")
    speed, efficient = figure.subplots(1, 2)
    for name, times in (
        ("FP32", [p.plain_s for p in points]),
        ("plan", [p.plan_s for p in points]),
        ("free compression", [p.free_s for p in points]),
    ):
        speed.plot(x, [p.hosts / t if not rates else 1 / t for p, t in zip(points, times)], label=name)
        efficient.plot(x, [p.compute_s / t for p, t in zip(points, times)], label=name)
    speed.set_ylabel("steps/s" if rates else "steps/s times hosts")
    efficient.set_ylabel("efficiency")
    for axes in (speed, efficient):
        axes.set_xlabel("Gbit/s between hosts" if rates else "hosts")
        axes.set_xscale("log")
        axes.legend()
    speed.set_title(title)
    figure.savefig(path)
