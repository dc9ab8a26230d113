"""Every table of the command line: for people with rich, for programs with --json."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

Row = dict[str, Any]
Commands = Any  # argparse names the type of add_subparsers() only privately


@dataclass(frozen=True)
class Column:
    key: str
    heading: str
    text: Callable[[Any], str] = str
    right: bool = False


def number(digits: int, unit: str = "") -> Callable[[float | None], str]:
    """A formatter of that many digits after the point; a missing number is a dash."""
    return lambda value: "–" if value is None else f"{value:.{digits}f}{unit}"


def yes_no(value: bool) -> str:
    return "yes" if value else "no"


def command(
    commands: Commands, name: str, help_text: str, example: str, description: str = ""
) -> argparse.ArgumentParser:
    """A parser for one command, with its example below the options."""
    result: argparse.ArgumentParser = commands.add_parser(
        name,
        help=help_text,
        description=description or help_text[0].upper() + help_text[1:] + ".",
        epilog=f"example: {example}",
    )
    return result


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def console(stderr: bool = False) -> Console:
    """Wide where nobody looks at it, so that no cell is cut in a log."""
    found = Console(stderr=stderr)
    return found if found.is_terminal else Console(stderr=stderr, width=200)


def show(
    title: str,
    columns: Sequence[Column],
    rows: Sequence[Row],
    notes: Sequence[str] = (),
    *,
    as_json: bool = False,
    section: str | None = None,
) -> None:
    """Prints rows as a table, or as JSON. `section` names a key whose changes are marked by a line."""
    if as_json:
        print(json.dumps({"title": title, "rows": list(rows), "notes": list(notes)}, indent=2))
        return
    table = Table(title=escape(title), title_justify="left")
    for column in columns:
        table.add_column(column.heading, justify="right" if column.right else "left", overflow="fold")
    for i, row in enumerate(rows):
        last = section is not None and i + 1 < len(rows) and rows[i + 1][section] != row[section]
        table.add_row(*(escape(column.text(row[column.key])) for column in columns), end_section=last)
    out = console()
    out.print(table)
    for note in notes:
        out.print(f"note: {note}", markup=False, highlight=False)
