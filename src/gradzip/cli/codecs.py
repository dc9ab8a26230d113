"""`gradzip codecs`: the registry."""

from __future__ import annotations

import argparse
import dataclasses

from ..codecs import REGISTRY, Codec, parse
from ..errors import Unsupported
from .table import Column, Commands, Row, add_json, command, show, yes_no

_COLUMNS = (
    Column("name", "codec"),
    Column("options", "options", lambda options: "\n".join(f"{k}={v}" for k, v in options.items()) or "–"),
    Column("lossless", "lossless"),
    Column("summable", "summable", yes_no),
    Column("fixed_size", "fixed\nsize", yes_no),
    Column("summary", "what it does", wrap=True),
)


def add(commands: Commands) -> None:
    parser = command(commands, "codecs", "list all codecs with their options", "gradzip codecs --json")
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    rows = [_row(cls) for _, cls in sorted(REGISTRY.items())]
    notes = ["write a codec as name:option=value,option=value, for example gcomp:keep=7,round=truncate"]
    show("codecs", _COLUMNS, rows, notes, as_json=args.json)
    return 0


def _row(cls: type[Codec]) -> Row:
    default = cls()
    return {
        "name": cls.name,
        "wire_id": cls.wire_id,
        "options": {field.name: _plain(field.default) for field in dataclasses.fields(cls)},
        "lossless": _lossless(default),
        "summable": cls.summable,
        "fixed_size": cls.fixed_size,
        "rounds": cls.rounds,
        "summary": cls.summary,
    }


def _plain(value: object) -> object:
    return str(value).lower() if value is None or isinstance(value, bool) else value


def _lossless(codec: Codec) -> str:
    if codec.lossless:
        return "yes"
    try:
        return "mode=lossless" if parse(f"{codec.name}:mode=lossless").lossless else "no"
    except Unsupported:
        return "no"
