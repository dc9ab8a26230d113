"""`gradzip bench codec`: size and speed of codecs on one core; `gradzip bench net` is in net.py."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .. import engines
from ..bench import codec as codec_bench
from ..bench import gpu as gpu_bench
from ..bench.codec import Result
from ..bench.sample import Sample
from ..codecs import parse
from ..errors import Unsupported
from . import net
from .progress import Progress
from .samples import append_csv, builtin, count
from .table import Column, Commands, Row, add_json, command, number, show

DEFAULT_CODECS = (
    "noise;noise:share=0.1;gcomp:mode=lossless;gcomp:keep=7;gcomp:mode=paper;gcomp;gcomp:ulps=16;gcomp:ulps=256;gcomp:ulps=4096;gcomp:ulps=65536;"
    "cast:to=bf16;lz4;zstd;zlib"
)

_COLUMNS = (
    Column("codec", "codec"),
    Column("engine", "engine"),
    Column("ratio", "ratio", number(3), right=True),
    Column("bits", "bits", number(2), right=True),
    Column("bound", "bound", number(2), right=True),
    Column("over", "over", number(1, "%"), right=True),
    Column("encode_gbps", "encode\nGB/s", number(2), right=True),
    Column("decode_gbps", "decode\nGB/s", number(2), right=True),
    Column("encode_memcpy", "encode\n/ copy", number(2, "x"), right=True),
    Column("decode_memcpy", "decode\n/ copy", number(2, "x"), right=True),
)


def add(commands: Commands) -> None:
    example = "gradzip bench codec --codecs 'gcomp:mode=lossless;zstd'"
    bench = command(commands, "bench", "measure on this machine", example)
    kinds = bench.add_subparsers(title="benchmarks", dest="kind", required=True, metavar="WHAT")
    parser = command(
        kinds,
        "codec",
        "size and speed of codecs on one core",
        "gradzip bench codec --codecs 'gcomp:mode=lossless;gcomp:ulps=256;zstd' --csv speeds.csv",
        "Verifies each codec's round trip, then times it against memcpy. Without --input the gradient comes from a "
        "10 M-parameter model that is trained once, for about a minute, and kept in the cache directory.",
    )
    parser.add_argument("--input", type=Path, metavar="FILE", help="a gradient: .npy or raw float32, or a .pt snapshot")
    parser.add_argument("--values", type=count, metavar="N", help="use only the first N values")
    parser.add_argument("--codecs", metavar="A;B;C", help=f"what to measure (default: {DEFAULT_CODECS})")
    parser.add_argument("--engine", choices=engines.NAMES, help="force this engine for gcomp and noise")
    parser.add_argument("--isa", metavar="I", help="force this instruction set; `gradzip doctor` lists them")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: GComp on the GPU, by size")
    parser.add_argument("--sizes", metavar="MIB", help="sizes for --device cuda, in MiB, as 4,16,1024")
    parser.add_argument("--rounds", type=count, default=codec_bench.ROUNDS, metavar="N", help="best of N (default: 9)")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="also append the rows to FILE")
    add_json(parser)
    parser.set_defaults(run=run)
    net.add(kinds)


_GPU_COLUMNS = (
    Column("codec", "codec"),
    Column("mib", "MiB", number(0), right=True),
    Column("chunks", "chunks", right=True),
    Column("ratio", "ratio", number(3), right=True),
    Column("encode_gbps", "encode\nGB/s", number(1), right=True),
    Column("decode_gbps", "decode\nGB/s", number(1), right=True),
    Column("copy_gbps", "copy\nGB/s", number(1), right=True),
    Column("encode_floor", "encode /\nmemory", number(2), right=True),
    Column("decode_floor", "decode /\nmemory", number(2), right=True),
)


def run_gpu(args: argparse.Namespace) -> int:
    sample = Sample.load(args.input, args.values) if args.input else builtin(args.values)
    sizes = tuple(int(size) for size in args.sizes.split(",")) if args.sizes else gpu_bench.SIZES
    names = [name for name in (args.codecs or gpu_bench.DEFAULT_CODECS).split(";") if name.strip()]
    with Progress() as say:
        say(f"measuring {', '.join(names)} on the GPU")
        rows = [dataclasses.asdict(result) for result in gpu_bench.measure(names, sample, sizes)]
    if args.csv:
        append_csv(args.csv, rows)
    title = f"GComp on {rows[0]['device']}; GB/s of raw input, {sample.name} repeated to each size"
    show(title, _GPU_COLUMNS, rows, as_json=args.json)
    return 0


def run(args: argparse.Namespace) -> int:
    if args.device == "cuda":
        return run_gpu(args)
    with engines.use(args.engine), _instruction_set(args.isa):
        sample = Sample.load(args.input, args.values) if args.input else builtin(args.values)
        specs = [spec for spec in (args.codecs or DEFAULT_CODECS).split(";") if spec.strip()]
        results, notes = [], []
        with Progress() as say:
            for number, spec in enumerate(specs, 1):
                say(f"measuring {spec} ({number} of {len(specs)})")
                try:
                    results.append(codec_bench.measure(parse(spec), sample, args.rounds))
                except Unsupported as reason:
                    if args.codecs:  # asked for by name: not to be passed over
                        raise
                    notes.append(f"{spec} left out: {reason}")
    if args.csv:
        append_csv(args.csv, [row(result) for result in results])
    if results:
        speeds = [result.memcpy_gbps for result in results]
        notes.append(f"memcpy ran at {min(speeds):.1f} to {max(speeds):.1f} GB/s between the codecs")
    title = f"{sample.values.numel():,} float32 values ({sample.name}), one core; bits per value, bound by entropy"
    show(title, _COLUMNS, [row(result) for result in results], notes, as_json=args.json)
    return 0


def row(result: Result) -> Row:
    derived = {"encode_memcpy": result.encode_memcpy, "decode_memcpy": result.decode_memcpy}
    return dataclasses.asdict(result) | derived


@contextmanager
def _instruction_set(name: str | None) -> Iterator[None]:
    """The native engine on that instruction set inside the block; as it was afterwards."""
    if name is None:
        yield
        return
    native = engines.load("native")
    before = native.isa()
    native.set_isa(name)
    try:
        yield
    finally:
        native.set_isa(before)
