"""Compiled kernels on disk. What is loaded from here runs on the GPU, so nobody else may have written it."""

from __future__ import annotations

import os
import stat
import tempfile
from functools import cache
from pathlib import Path

from ...errors import warn

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "gradzip" / "kernels"


def read(name: str) -> bytes | None:
    """A kernel that this user has compiled before; None if there is none."""
    place = folder()
    if not place.is_dir() or not _is_safe(place):
        return None
    try:
        number = os.open(place / name, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return None
    with os.fdopen(number, "rb") as file:
        reason = _reason_against(os.fstat(number))  # of the file that is read, whatever its name stands for by now
        if reason is None and stat.S_ISREG(os.fstat(number).st_mode):
            return file.read()
    _warn_once(f"the compiled kernel {place / name} {reason or 'is not a file'}", f"rm '{place / name}'")
    return None


def write(name: str, binary: bytes) -> None:
    """Keeps a kernel for the next process. A cache that cannot be written only costs time."""
    place = folder()
    try:
        for part in (place.parent, place):
            part.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_safe(place):
            return
        with tempfile.NamedTemporaryFile(dir=place, delete=False) as file:  # readable by this user alone
            file.write(binary)
        os.replace(file.name, place / name)  # several processes may compile at once
    except OSError:
        pass


def _is_safe(place: Path) -> bool:
    """Whether this user alone can change what lies there; warns if not."""
    for part in (place.parent, place):
        reason = _reason_against(part.lstat())
        if reason is not None:
            _warn_once(f"the folder of compiled kernels {part} {reason}", f"rm -r '{part}', or set XDG_CACHE_HOME")
            return False
    return True


def _reason_against(found: os.stat_result) -> str | None:
    if stat.S_ISLNK(found.st_mode):
        return "is a link"
    if found.st_uid != os.geteuid():
        return f"belongs to user {found.st_uid}, not to you ({os.geteuid()})"
    if found.st_mode & _OTHERS_WRITE:
        return f"can be written by others (mode {stat.S_IMODE(found.st_mode):o})"
    return None


@cache
def _warn_once(what: str, cure: str) -> None:
    warn(f"{what}: it is not used, and every process compiles its kernels anew. To mend it: {cure}")
