"""`gradzip demo`: what compression does to training on a slow network, seen on this machine."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from .. import demo, emulate, report
from ..bench.codec import measure
from ..bench.sample import Sample
from ..codecs import parse
from ..demo import launch, verdict
from ..demo.settings import AUTO, PLAIN, SIZE, SNAPSHOT, WORDS
from ..emulate import Rates, format_rate, parse_rate
from ..errors import Unsupported
from ..planner.auto import BLOCK, LISTS_AT
from ..planner.candidates import LISTED
from ..planner.race import ROUNDS
from ..report.page import summary
from .bench import row
from .report import write
from .table import Column, Commands, Row, add_json, command, console, number, show

CODECS = (
    "gcomp:mode=lossless",
    "gcomp",
    "gcomp:ulps=256",
    "gcomp:ulps=4096",
    "gcomp:keep=7",
    "noise",
    "cast:to=bf16",
    "zstd",
    "lz4",
)


ENOUGH = LISTS_AT + (1 + LISTED) * ROUNDS * BLOCK  # steps after which auto has chosen, unless times vary much
_CODING = "coding one gradient with each codec"
_BUSY = 0.2  # of all processor time, taken by other programs
_NOTABLE = 0.02  # of a step
_CROWDED = 0.6  # of a step: what is computed and coded then takes longer than on a real cluster


def _error(error: float) -> str:
    return "exact" if error == 0 else f"{error:.0e}"


_CODEC_COLUMNS = (
    Column("codec", "codec"),
    Column("words", "in words", wrap=True),
    Column("ratio", "ratio", number(2, "x"), right=True),
    Column("bits", "bits", number(2), right=True),
    Column("l2_error", "error of\nthe whole", _error, right=True),
    Column("encode_gbps", "encode\nGB/s", number(2), right=True),
    Column("decode_gbps", "decode\nGB/s", number(2), right=True),
)


def add(commands: Commands) -> None:
    parser = command(
        commands,
        "demo",
        "train a small model over a slow network, with each codec",
        "gradzip demo --rate 100mbit",
        "Trains a small language model on the sources of Python's own library with DistributedDataParallel, on four "
        "emulated hosts: plainly, and with each codec. Prints a table and writes an HTML report. Needs no data, no GPU "
        "and no second machine. Where hosts cannot be emulated, step times are predicted and labelled so.",
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--seconds", type=float, default=90.0, help="for all runs together (default: 90)")
    length.add_argument("--steps", type=int, help="so many steps for each run instead")
    parser.add_argument("--hosts", type=int, default=4, metavar="N", help="default: 4")
    parser.add_argument("--rate", default="1gbit", help="of each host, each way: 100mbit, 2.5gbit (default: 1gbit)")
    parser.add_argument("--no-limit", action="store_true", help="do not emulate a network: train here, predict times")
    out = Path("gradzip-demo.html")
    parser.add_argument("--out", type=Path, default=out, metavar="FILE", help=f"the report (default: {out})")
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if not args.seconds > 0 or (args.steps is not None and args.steps < 3):
        raise Unsupported("give the demo some time: --seconds above 0, or at least 3 --steps")
    parse_rate(args.rate)
    obstacle = "as asked for by --no-limit" if args.no_limit else emulate.obstacle()
    settings = demo.Settings(args.seconds, args.steps, args.hosts, args.rate, obstacle is None)
    with tempfile.TemporaryDirectory(prefix="gradzip-demo-") as name:
        folder = Path(name)
        with _progress(settings) as follow:
            result = demo.run(folder, settings, follow.step, follow.hosts_are_up)
            follow.coding()
            codecs, left_out = _codecs(folder)
    title, notes = _words(settings, result, obstacle)
    shown = [*result.runs, *result.predicted]
    first = verdict.predicted(result.runs, result.predicted) if obstacle else [verdict.measured(result.runs, args.rate)]
    lead = " ".join([*first, f"{title[0].upper()}{title[1:]}."])
    html = report.page(shown, title="gradzip demo", lead=lead, notes=notes, plan=result.plan, stories=result.stories)
    write(args.out, html)
    rows = summary(result.runs)
    if args.json:
        predicted = summary(result.predicted) if result.predicted else []
        found = {"verdict": first, "title": title, "rows": rows, "predicted": predicted, "codecs": codecs}
        print(json.dumps(found | {"notes": [*notes, *left_out], "report": str(args.out)}, indent=2))
        return 0
    for sentence in first:
        console().print(f"{sentence}\n", markup=False, highlight=False, soft_wrap=True)
    _show(f"gradzip demo: {title}", rows, notes)
    for rate in dict.fromkeys(run.name.partition(", predicted at ")[2] for run in result.predicted):
        own = [run for run in result.predicted if run.name.endswith(f" {rate}")]
        _show(f"PREDICTED for {rate}, from codecs and computing as they were measured here", summary(own), [])
    show("what each codec makes of the last gradient of plain training, on one core", _CODEC_COLUMNS, codecs, left_out)
    console().print(f"report: {args.out.resolve()}", markup=False, highlight=False, soft_wrap=True)
    return 0


def _show(title: str, rows: list[dict[str, str]], notes: list[str]) -> None:
    columns = [
        Column(key, key, _fold, wrap=True)
        if key == "in words"
        else Column(key, key.replace(" at ", " at\n"), right=key != "run")
        for key in rows[0]
    ]
    show(title, columns, rows, notes)


def _fold(words: str) -> str:
    """In lines of a width that fits into logs, too."""
    return textwrap.fill(words, 44)


def _words(settings: demo.Settings, result: demo.Result, obstacle: str | None) -> tuple[str, list[str]]:
    steps = max(len(run.steps) for run in result.runs)
    model = f"a {SIZE.parameters / 1e6:.1f} M-parameter language model"
    if settings.size != SIZE:
        model = f"a language model of {settings.size.parameters:,} parameters"
    where = f"{settings.hosts} hosts at {format_rate(parse_rate(settings.rate))}"
    notes = list(result.notes)
    if steps < ENOUGH and any(str(run.about["policy"]).startswith("auto") for run in result.runs):
        notes.append(f"auto may need {ENOUGH} steps until it has chosen: give it more to see what it gains")
    notes += _noise(result)
    if result.elsewhere > _BUSY:
        notes.append(
            f"other programs took {100 * result.elsewhere:.0f} % of this machine's processor time: steps took longer "
            "than on a quiet machine, those that code above all"
        )
    if stopped := {run.name: run.about["stopped"] for run in result.runs if "stopped" in run.about}:
        words = ", ".join(f"{name} after {count}" for name, count in stopped.items())
        notes.append(
            f"this machine became slower, so these runs ended early: {words} steps. "
            f"Losses of all runs are compared at step {min(len(run.steps) for run in result.runs)}"
        )
    if obstacle is None:
        if result.rates is not None:
            notes.insert(
                0,
                f"{format_rate(result.rates.one_flow)} measured between hosts; all of them share this machine's cores",
            )
        return f"{model}, {steps} steps, {where}", [*notes, *_crowded(settings, result)]
    notes.insert(0, "the network was not limited: these step times are those of the loopback")
    if not obstacle.startswith("as asked"):
        notes.insert(0, obstacle)
    notes.append(f"to measure instead of predicting: gradzip demo --rate {settings.rate}, with root or user namespaces")
    return f"{model}, {steps} steps, {settings.hosts} processes on this machine", notes


def _noise(result: demo.Result) -> list[str]:
    """Where `auto` sent what plain DDP sends, their speeds differ by chance alone."""
    found = {run.name: run for run in result.runs}
    if AUTO not in found or PLAIN not in found or not launch.stayed_plain(found[AUTO]):
        return []
    auto_s, plain_s = found[AUTO].step_seconds(), found[PLAIN].step_seconds()
    if not auto_s or not plain_s or abs(auto_s / plain_s - 1) < _NOTABLE:
        return []
    return [
        f"auto sent what plain DDP sends: that its steps took {100 * abs(auto_s / plain_s - 1):.0f} % "
        f"{'more' if auto_s > plain_s else 'less'} time shows how much this machine's times vary"
    ]


def _crowded(settings: demo.Settings, result: demo.Result) -> list[str]:
    """Whether the cores of this machine, which all hosts share, hold the runs up more than the network does."""
    cores = len(os.sched_getaffinity(0))
    trained = [run for run in result.runs if not str(run.about["policy"]).startswith("auto")]  # which also measures
    share = {run.name: run.about["processor_seconds"] / cores / (run.step_seconds() or 1.0) for run in trained}
    worst = max(share, key=share.__getitem__)
    if share[worst] < _CROWDED or cores >= settings.hosts:
        return []
    return [
        f"{cores} core{'s' * (cores > 1)} worked for {settings.hosts} hosts, and for {100 * share[worst]:.0f} % of the "
        f"time with {worst}: hosts with cores of their own gain more, and so do slower networks (--rate 100mbit)"
    ]


def _codecs(folder: Path) -> tuple[list[Row], list[str]]:
    sample, rows, notes = Sample.load(folder / SNAPSHOT), [], []
    for spec in CODECS:
        try:
            rows.append({"words": WORDS[spec], **row(measure(parse(spec), sample, rounds=3, patience=0.5))})
        except Unsupported as reason:
            notes.append(f"{spec} left out: {reason}")
    return rows, notes


class _Follow(NamedTuple):
    """What is called as the demo goes on."""

    hosts_are_up: Callable[[Rates | None], None]
    step: Callable[[demo.Progress], None]
    coding: Callable[[], None]


@contextmanager
def _progress(settings: demo.Settings) -> Iterator[_Follow]:
    """Shows how far the demo is, on stderr: a bar for each run on a terminal, elsewhere a line for each."""
    with (_bars if sys.stderr.isatty() else _lines)(settings) as follow:
        yield follow


@contextmanager
def _lines(settings: demo.Settings) -> Iterator[_Follow]:
    seen: list[str] = []

    def say(text: str) -> None:
        print(f"gradzip demo: {text}", file=sys.stderr, flush=True)

    def ready(rates: Rates | None) -> None:
        say("timing plain steps" + ("" if rates is None else f", {format_rate(rates.one_flow)} between hosts"))

    def tell(now: demo.Progress) -> None:
        if now.run not in seen:
            seen.append(now.run)
            say(f"run {len(seen)} of {len(settings.policies)}: {now.run}, {now.steps} steps")

    say(f"starting {settings.hosts} hosts")
    yield _Follow(ready, tell, lambda: say(_CODING))


@contextmanager
def _bars(settings: demo.Settings) -> Iterator[_Follow]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=16),
        TextColumn("{task.fields[now]}"),
        TimeElapsedColumn(),
    )
    with Bar(*columns, console=console(stderr=True)) as bar:
        starting = bar.add_task("starting the hosts", total=None, now="")
        tasks: dict[str, int] = {}

        def ready(rates: Rates | None) -> None:
            speed = "" if rates is None else f"{format_rate(rates.one_flow)} between hosts"
            bar.update(starting, description="timing plain steps", now=speed)

        def tell(now: demo.Progress) -> None:
            bar.update(starting, visible=False)
            if now.run not in tasks:
                for ended in bar.tasks:  # also one that was cut short: its clock stops
                    bar.stop_task(ended.id)
                name = f"{len(tasks) + 1}/{len(settings.policies)} {now.run}"
                tasks[now.run] = bar.add_task(name, total=now.steps, now="")
            text = f"{now.step}/{now.steps}  {now.step_ms:.0f} ms  loss {now.loss:.2f}"
            bar.update(tasks[now.run], completed=now.step, now=text)  # type: ignore[arg-type]

        def coding() -> None:
            for ended in bar.tasks:
                bar.stop_task(ended.id)
            bar.add_task(_CODING, total=None, now="")

        yield _Follow(ready, tell, coding)
