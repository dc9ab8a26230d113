"""Runs a script as several ranks, each a Python process of its own that ends as Python ends, with its exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ranks import DEADLINE, engine_of_ranks, free_port


class Ended(NamedTuple):
    code: int
    out: str
    err: str


def run_scripts(
    world: int, script: Path, *args: str, only: Mapping[int, Mapping[str, str]] | None = None
) -> list[Ended]:
    """What `world` processes of a script said and how they ended. `only` has variables for single ranks."""
    ranks = start_scripts(world, script, *args, only=only)
    try:
        said = [rank.communicate(timeout=DEADLINE) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [Ended(rank.returncode, *both) for rank, both in zip(ranks, said)]


def start_scripts(
    world: int, script: Path, *args: str, only: Mapping[int, Mapping[str, str]] | None = None
) -> list[subprocess.Popen[str]]:
    shared = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shared |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "GRADZIP_ENGINE": engine_of_ranks()}
    shared["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    return [
        subprocess.Popen(
            [sys.executable, script, *args],
            env=os.environ | shared | {"RANK": str(rank)} | dict((only or {}).get(rank, {})),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
