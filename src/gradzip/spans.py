"""Ranges for torch.profiler: what gradzip does, by name, in a trace. Where no profiler runs they cost nothing.

torch.profiler sees the thread that it was started on, and autograd's. gradzip codes and waits on threads of its own,
which appear only under `profile_all_threads=True` (docs/training.md). `until` is for the rest: a range that begins on
the thread of backward and ends on whichever completes the future, as torch's own ranges of collectives do.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.autograd import profiler

_NOTHING = nullcontext()


def span(what: str, of: str = "") -> AbstractContextManager[Any]:
    """A range on this thread."""
    return profiler.record_function(_name(what, of)) if profiler._is_profiler_enabled else _NOTHING


def until(done: torch.futures.Future[Any], what: str, of: str = "") -> None:
    """A range from now until the future is done."""
    if profiler._is_profiler_enabled:
        begun = profiler.record_function(_name(what, of))
        begun.__enter__()  # type: ignore[no-untyped-call]
        begun._call_end_callbacks_on_future(done)


def _name(what: str, of: str) -> str:
    return f"gradzip: {what} {of.partition(' (')[0]}".rstrip()  # brackets hold what ranks compare, not what people read
