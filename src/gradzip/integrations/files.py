"""A handle's state in a folder: one file for each rank."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from ..hooks import Handle


def save(handle: Handle, folder: str | Path, name: str = "gradzip") -> None:
    """Writes this rank's state. Call it on all ranks."""
    path = _file(folder, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(handle.state_dict(), path)


def load(handle: Handle, folder: str | Path, name: str = "gradzip") -> None:
    """Resumes from what each rank wrote; a rank without a file starts with empty residuals. Call it on all ranks."""
    path = _file(folder, name)
    handle.resume(torch.load(path, map_location="cpu", weights_only=True) if path.exists() else None)


def _file(folder: str | Path, name: str) -> Path:
    return Path(folder) / f"{name}-{dist.get_rank()}.pt"
