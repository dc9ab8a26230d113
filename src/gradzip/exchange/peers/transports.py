"""What users may ask for to carry large messages: Gloo from the host's memory, or NCCL from GPU to GPU.

Only collectives/ has the latter, and says where it can be had.
"""

from __future__ import annotations

import os

from ...errors import Unsupported, nearest

GLOO, NCCL = "gloo", "nccl"
TRANSPORT = "GRADZIP_TRANSPORT"  # gloo or nccl: used instead of what the code says


def asked_for(wanted: str | None) -> str:
    """By the environment first, else by the code."""
    word = os.environ.get(TRANSPORT, "").strip().lower() or wanted or GLOO
    if word not in (GLOO, NCCL):
        raise Unsupported(f"unknown transport {word!r}{nearest(word, (GLOO, NCCL))}: it is {GLOO} or {NCCL}")
    return word
