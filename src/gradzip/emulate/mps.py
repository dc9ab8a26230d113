"""CUDA's multi-process service: without it, ranks that share a GPU wait for each other's spinning NCCL kernels."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ..errors import EmulationError

CONTROL = "nvidia-cuda-mps-control"
_LAST_WORD = b"quit -t 5\n"  # seconds for a server that still has clients
_PATIENCE = 15


@contextmanager
def daemon(control: str) -> Iterator[dict[str, str]]:
    """Runs a service of our own; what its clients need in their environment. Another one that runs is left alone."""
    with tempfile.TemporaryDirectory(prefix="gradzip-mps-", ignore_cleanup_errors=True) as folder:
        variables = {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
        for path in variables.values():
            os.mkdir(path)
        environment = os.environ | variables
        started = subprocess.run([control, "-d"], env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        if started.returncode != 0:
            raise EmulationError(f"`{control} -d` failed with exit code {started.returncode}: run without --gpu-share")
        try:
            yield variables
        finally:
            with suppress(subprocess.TimeoutExpired):
                quiet = subprocess.DEVNULL
                subprocess.run([control], env=environment, input=_LAST_WORD, stdout=quiet, timeout=_PATIENCE)
