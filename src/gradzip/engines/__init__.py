"""How the bits of docs/format.md are moved: three engines with one interface and identical bytes.

    reference   plain NumPy, the oracle
    native      C++ with SIMD, for CPU tensors
    cuda        GPU kernels, for CUDA tensors

Each engine is a module with encode, decode, histogram and code_lengths. `pick` is the only resolver; the
environment variable GRADZIP_ENGINE or `use()` overrides it. Nothing falls back silently: an engine that is asked
for and missing is an EngineError, and a CPU without the native library is one too.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import torch

from ..errors import EngineError, Unsupported

NAMES = ("reference", "native", "cuda")
_override: str | None = None


def load(name: str) -> ModuleType:
    """The engine module of that name; EngineError with the reason if it cannot run here."""
    if name not in NAMES:
        raise EngineError(f"unknown engine {name!r}: choose one of {', '.join(NAMES)}")
    try:
        engine = importlib.import_module(f".{name}", __name__)
        if name == "cuda":
            engine.require_device()
    except (ImportError, OSError, EngineError) as cause:
        raise EngineError(f"the {name} engine cannot run here: {cause}") from cause
    return engine


def noise(device: torch.device | str) -> ModuleType:
    """The engine of the codec `noise` for tensors on `device`."""
    name = pick(device).NAME
    return importlib.import_module(".cuda.noise" if name == "cuda" else f".{name}_noise", __name__)


def scaled(device: torch.device | str) -> ModuleType:
    """The engine of block-scaled codes (`int8`, `int4`, `fp8`) for tensors on `device`."""
    name = pick(device).NAME
    return importlib.import_module(".cuda.scaled" if name == "cuda" else f".{name}_scaled", __name__)


def pick(device: torch.device | str) -> ModuleType:
    """The engine for tensors on `device`."""
    kind = torch.device(device).type
    name = _override or os.environ.get("GRADZIP_ENGINE") or ("cuda" if kind == "cuda" else "native")
    if kind != "cpu" and name in ("reference", "native"):  # they would take its addresses for the CPU's
        raise Unsupported(f"the {name} engine codes CPU tensors, not one on {device}: move it to the CPU first")
    return load(name)


@contextmanager
def use(name: str | None) -> Iterator[None]:
    """Forces one engine inside a `with` block."""
    global _override
    previous, _override = _override, name
    try:
        yield
    finally:
        _override = previous
