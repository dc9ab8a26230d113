"""Every table of the command line: for people with rich, for programs with --json."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

Row = dict[str, Any]
NO_SCREEN = 200  # columns
Commands = Any  # argparse names the type of add_subparsers() only privately


@dataclass(frozen=True)
class Column:
    key: str
    heading: str
    text: Callable[[Any], str] = str
    right: bool = False  # aligned to the right, as numbers are
    wrap: bool = False  # long texts may take several lines


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


def console(stderr: bool = False, least: int = 0) -> Console:
    """As wide as the screen or `least`; wide where there is no screen, so that nothing is broken up in a log."""
    found = Console(stderr=stderr)
    return Console(stderr=stderr, width=max(found.width if found.is_terminal else NO_SCREEN, least))


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
    texts = [[column.text(row[column.key]) for column in columns] for row in rows]
    table = Table(title=escape(title), title_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    for i, column in enumerate(columns):
        side: Literal["left", "right"] = "right" if column.right else "left"
        lines = "\n".join([column.heading, *(cells[i] for cells in texts)]).split("\n")
        # A number that is cut is a wrong number, so whatever may not wrap gets all the room it needs.
        least = 20 if column.wrap else max(map(len, lines))
        table.add_column(column.heading, justify=side, overflow="fold", no_wrap=not column.wrap, min_width=least)
    for i, cells in enumerate(texts):
        last = section is not None and i + 1 < len(rows) and rows[i + 1][section] != rows[i][section]
        table.add_row(*map(escape, cells), end_section=last)
    out = console()
    needed = Measurement.get(out, out.options.update(max_width=1000), table)  # out.measure would stop at the screen
    target = console(least=needed.minimum)
    if target.is_terminal:
        target.print(table, crop=False)
    else:  # rich fills lines up with blanks, which is of no use in a pipe or a file
        with target.capture() as captured:
            target.print(table, crop=False)
        print("\n".join(line.rstrip() for line in captured.get().splitlines()))
    for note in notes:
        out.print(f"note: {note}", markup=False, highlight=False)
