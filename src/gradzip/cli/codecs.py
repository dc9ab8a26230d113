"""`gradzip codecs`: the registry."""

from __future__ import annotations

import argparse
import dataclasses

import torch

from ..codecs import REGISTRY, Codec, parse
from ..errors import Unsupported
from ..hooks import default
from .table import Column, Commands, Row, add_json, command, show, yes_no

SIZE = 1 << 20  # values of the tensor that the cost is given for


def _cost(bits: dict[str, object]) -> str:
    if bits["value"] is None:
        return "rank · (n + m) values\nof an n · m matrix"
    return f"{'' if bits['fixed'] else '<= '}{bits['value']:.2f}"


def _options(options: dict[str, object]) -> str:
    return "\n".join(f"{name}={value}" for name, value in options.items() if name != "feedback") or "–"


_COLUMNS = (
    Column("name", "codec"),
    Column("options", "options", _options),
    Column("bits", "bits per value", _cost, right=True),
    Column("summary", "what is sent", wrap=True),
    Column("error", "what is lost", wrap=True),
    Column("summable", "summable", yes_no),
)


def add(commands: Commands) -> None:
    parser = command(commands, "codecs", "list all codecs with their options", "gradzip codecs --json")
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    rows = [_row(cls) for _, cls in sorted(REGISTRY.items())]
    notes = [
        f"bits per value: of {SIZE} float32 values, with the options shown; <= where they depend on the values",
        "all that lose something also have feedback=auto|true|false|bf16|cpu: whether and where that is kept",
        "summable: frames are averaged without decoding them",
        f"attach(model, optimizer) takes {default.in_words()}",
        "write a codec as name:option=value,option=value, for example gcomp:keep=7,round=truncate",
    ]
    show("codecs", _COLUMNS, rows, notes, as_json=args.json)
    return 0


def _row(cls: type[Codec]) -> Row:
    default = cls()
    return {
        "name": cls.name,
        "wire_id": cls.wire_id,
        "options": {field.name: _plain(field.default) for field in dataclasses.fields(cls)},
        "lossless": _lossless(default),
        "biased": default.biased,
        "feedback": default.error_memory or "none",
        "error": cls.error,
        "bits": {"value": _bits(default), "fixed": cls.fixed_size},
        "summable": cls.summable,
        "rounds": cls.rounds,
        "summary": cls.summary,
    }


def _bits(codec: Codec) -> float | None:
    return None if codec.rounds > 1 else 8 * codec.bound(SIZE, torch.float32) / SIZE


def _plain(value: object) -> object:
    return str(value).lower() if value is None or isinstance(value, bool) else value


def _lossless(codec: Codec) -> str:
    if codec.lossless:
        return "yes"
    try:
        return "mode=lossless" if parse(f"{codec.name}:mode=lossless").lossless else "no"
    except Unsupported:
        return "no"
