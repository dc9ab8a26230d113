"""gradzip: compressed gradient exchange for PyTorch, and a planner that knows whether it pays."""

from __future__ import annotations

import torch

from . import codecs, errors, optim, wire
from .accordion import Accordion
from .codecs import Codec, Context, parse
from .engines.layout import Floor
from .errors import (
    CodecError,
    Corrupt,
    EngineError,
    GradzipError,
    GradzipWarning,
    PeerError,
    PlanError,
    Truncated,
    Unsupported,
)
from .hooks import Handle, attach
from .option import Option
from .plan import Plan
from .policy import Fixed, Policy, Rules
from .sensitivity import floors, reaches, rules

__version__ = "0.1.0"


def encode(
    x: torch.Tensor,
    codec: str | Codec = "gcomp",
    *,
    floor: torch.Tensor | Floor | None = None,
    out: torch.Tensor | None = None,
    check: bool = False,
) -> torch.Tensor:
    """`x` as one self-describing frame: a 1-D uint8 tensor on x's device.

    `floor` is what near mode needs (see `floors`); `check` adds a checksum; `out` is reused instead of allocating.
    """
    return parse(codec).encode(x, Context(floor=floor), out, check)


def decode(
    payload: torch.Tensor,
    *,
    floor: torch.Tensor | Floor | None = None,
    out: torch.Tensor | None = None,
    add: bool = False,
) -> torch.Tensor:
    """The flat tensor of a frame. With `out` nothing is allocated; with `add` it is added to `out`."""
    header = wire.read_header(payload)
    if header.codec_id not in codecs.BY_ID:
        raise Corrupt(f"the frame is of an unknown codec (id {header.codec_id}): use the same gradzip on all ranks")
    return codecs.BY_ID[header.codec_id]().decode(payload, Context(floor=floor), out, add)


__all__ = [
    "Accordion",
    "Codec",
    "CodecError",
    "Context",
    "Corrupt",
    "EngineError",
    "Fixed",
    "Floor",
    "GradzipError",
    "GradzipWarning",
    "Handle",
    "Option",
    "PeerError",
    "Plan",
    "PlanError",
    "Policy",
    "Rules",
    "Truncated",
    "Unsupported",
    "__version__",
    "attach",
    "decode",
    "encode",
    "errors",
    "floors",
    "optim",
    "parse",
    "reaches",
    "rules",
]
