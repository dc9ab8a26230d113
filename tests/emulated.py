"""The GPU kernels on the CPU: compiled by the C++ compiler with tests/emulator/warps.h in the place of a GPU."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gradzip.engines.cuda import driver, launch
from gradzip.engines.layout import Floor

COMPILER = shutil.which("g++")
_FOLDER = Path(tempfile.gettempdir()) / "gradzip-emulated"


class Emulator:
    """Stands in for a GPU. Kernels are compiled when they are first used, and kept for the next run."""

    def __init__(self) -> None:
        self.launched: list[str] = []
        self._functions: dict[str, Callable[..., Any]] = {}
        self._one_at_a_time = threading.Lock()

    def bind(
        self,
        kernel: str,
        arguments: ctypes.Array[ctypes.c_char],
        groups: int,
        threads: int,
        stream: int,
        follows: bool = False,
    ) -> Callable[[], None]:
        def launch() -> None:
            self.launched.append(kernel)
            with self._one_at_a_time:  # the emulator's state is the process's
                self._functions[kernel](arguments, groups, threads)

        return launch

    def load(self, kernel: str, threads: int, shared: int, least: int = 1) -> int:
        self._functions[kernel] = ctypes.CDLL(str(_compiled(kernel))).entry
        return 2  # so that small inputs make a group take more than one turn

    def fits(self, shared: int) -> bool:
        return True

    def warps(self, shared: int) -> int:
        return 2

    def stream(self) -> int:
        return 0

    def wait(self, stream: int) -> None:
        pass


def _compiled(kernel: str) -> Path:
    text = f"""#include "{Path(__file__).parent / "emulator" / "warps.h"}"
{driver.source(kernel)}
extern "C" void entry(const Args* a, unsigned groups, unsigned threads) {{
    emulator::launch([](const void* p) {{ {kernel}(*(const Args*)p); }}, a, groups, threads);
}}
"""
    header = (Path(__file__).parent / "emulator" / "warps.h").read_bytes()
    path = _FOLDER / f"{hashlib.sha256(text.encode() + header).hexdigest()[:32]}.so"
    if not path.is_file():
        assert COMPILER is not None
        _FOLDER.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            made, source = Path(folder) / "kernel.so", Path(folder) / "kernel.cpp"
            source.write_text(text)
            flags = ["-O1", "-std=c++17", "-fPIC", "-shared", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"]
            flags += ["-Wno-unknown-pragmas", "-Wno-unused-function"]
            subprocess.run([COMPILER, *flags, str(source), "-o", str(made)], check=True)
            shutil.move(made, path)
    return path


def install() -> Emulator:
    """From now on the cuda engine takes CPU tensors."""
    emulator = Emulator()
    launch.emulator = emulator
    launch._of_thread.workspaces.clear()  # what was prepared there is bound to the emulator of before
    return emulator


def floors(numel: int, kind: str) -> torch.Tensor | Floor:
    """Floors to encode with: given as numbers, or made from parameters ("theta") and moments ("both")."""
    rng = torch.Generator().manual_seed(numel)
    if kind == "given":
        given = torch.randint(-30, -10, (numel,), generator=rng).to(torch.int8)
        given[::7], given[3::11] = -128, 120
        return given
    theta, second = (
        torch.randn(numel, generator=rng) * 0.05,
        torch.rand(numel, generator=rng) * 1e-8,
    )
    return Floor(theta, None, -160) if kind == "theta" else Floor(theta, second, -150, -75, -4)
