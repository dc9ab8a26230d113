"""Stands in for a GPU with NCCL: the kernels run on the CPU, Gloo carries what they make, and streams do nothing."""

from __future__ import annotations

import logging

import emulated

from gradzip.engines.cuda import launch
from gradzip.exchange import on_stream, slots


def install(room: float = 100.0) -> None:
    """From now on, attach takes models on the CPU for models on a GPU with NCCL.

    `room`: of the first slots. By default every frame fits, so that none is coarser than the interpreter's.
    """
    slots.FIRST_ROOM = room
    logging.getLogger("gradzip").setLevel(logging.WARNING)
    emulated.install()
    launch.load_once.cache_clear()
    on_stream.reason_against = lambda group, device: None  # type: ignore[assignment]
