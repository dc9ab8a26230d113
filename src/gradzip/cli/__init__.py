"""The command line: each module here is one command, and only parses arguments and prints.

A command module has `add(commands)`, which adds its parser and sets `run` on it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .. import __version__
from ..errors import GradzipError
from . import bench, codecs, demo, doctor, emulate, plan, profile, report

_COMMANDS = (doctor, codecs, bench, emulate, profile, plan, report, demo)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="gradzip",
        description="Compressed gradient exchange for PyTorch.",
        epilog="example: gradzip demo",
    )
    top.add_argument("--version", action="version", version=f"gradzip {__version__}")
    commands = top.add_subparsers(title="commands", dest="command", required=True, metavar="COMMAND")
    for command in _COMMANDS:
        command.add(commands)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; the exit code is 0, 1 when it failed or found something wrong, 2 for a wrong command line."""
    args = parser().parse_args(argv)
    try:
        status: int = args.run(args)
        return status
    except GradzipError as error:
        print(f"gradzip: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


__all__ = ["main", "parser"]
