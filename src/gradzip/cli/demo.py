"""`gradzip demo`: a minute of real training, and what each codec makes of its gradients."""

from __future__ import annotations

import argparse
import sys

from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from .. import capture
from ..bench.codec import measure
from ..bench.sample import Sample
from ..codecs import parse
from ..errors import Unsupported
from .bench import row
from .table import Column, Commands, Row, add_json, command, console, number, show

CODECS = (
    "gcomp:mode=lossless",
    "gcomp",
    "gcomp:ulps=256",
    "gcomp:ulps=4096",
    "gcomp:keep=7",
    "cast:to=bf16",
    "zstd",
    "lz4",
)
MOMENTS = {"early": 0.1, "middle": 0.5, "late": 1.0}


def _error(error: float) -> str:
    return "exact" if error == 0 else f"{error:.0e}"


_COLUMNS = (
    Column("moment", "when"),
    Column("codec", "codec"),
    Column("ratio", "ratio", number(2, "x"), right=True),
    Column("bits", "bits", number(2), right=True),
    Column("max_error", "max\nerror", _error, right=True),
    Column("l2_error", "vector\nerror", _error, right=True),
    Column("encode_gbps", "encode\nGB/s", number(2), right=True),
    Column("decode_gbps", "decode\nGB/s", number(2), right=True),
)


def add(commands: Commands) -> None:
    parser = command(
        commands,
        "demo",
        "train a small model and compress its gradients",
        "gradzip demo --seconds 20",
        "Trains a small language model on the sources of Python's own library and shows what each codec makes of its "
        "gradients early, in the middle and late in the run. Needs no data, no GPU and no second machine.",
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--seconds", type=float, default=50.0, help="how long to train (default: 50)")
    length.add_argument("--steps", type=int, help="train so many steps instead")
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    snapshots = _train(args.steps, None if args.steps else args.seconds)
    rows, notes = [], []
    for moment, snapshot in zip(MOMENTS, snapshots):
        sample = Sample.of(snapshot)
        for spec in CODECS:
            try:
                rows.append(_row(moment, snapshot, spec, sample))
            except Unsupported as reason:
                notes.append(f"{spec} left out: {reason}")
    title = f"gradients of a {snapshots[0].gradient.numel() / 1e6:.1f} M-parameter model under AdamW, on one core"
    steps = ", ".join(f"{moment} is step {s.step} (loss {s.loss:.2f})" for moment, s in zip(MOMENTS, snapshots))
    notes.insert(0, f"{steps}; bits per value; errors are relative, of the worst value and of the whole vector")
    show(title, _COLUMNS, rows, list(dict.fromkeys(notes)), as_json=args.json, section="moment")
    return 0


def _row(moment: str, snapshot: capture.Snapshot, spec: str, sample: Sample) -> Row:
    result = row(measure(parse(spec), sample, rounds=3, patience=1.0))
    return result | {"moment": moment, "loss": snapshot.loss}


def _train(steps: int | None, seconds: float | None) -> list[capture.Snapshot]:
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[now]}"), TimeRemainingColumn())
    with Bar(*columns, console=console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("training", total=1.0, now="")

        def tell(now: capture.Progress) -> None:
            bar.update(task, completed=now.fraction, now=f"step {now.step}  loss {now.loss:.3f}")

        return capture.train(capture.DEMO, steps=steps, seconds=seconds, at=tuple(MOMENTS.values()), on_step=tell)
