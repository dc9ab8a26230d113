"""Which way bytes go between ranks: over Gloo from the host's memory, or from GPU to GPU over NCCL."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from ..errors import Unsupported
from ..exchange.peers.transports import GLOO, NCCL, TRANSPORT, asked_for
from . import nccl


def choose(wanted: str | None, group: dist.ProcessGroup, device: torch.device) -> str:
    """What is asked for, by the environment first; Unsupported where it cannot be had. All ranks must choose alike."""
    word = asked_for(wanted)
    if word == NCCL and (reason := reason_against(group, device)) is not None:
        raise Unsupported(f"transport={NCCL}: {reason}. Leave it out, or set {TRANSPORT}={GLOO}")
    return word


def check_model(model: nn.Module) -> None:
    """Unsupported for models that communicate over NCCL in the middle of backward, beside what gradzip carries."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.SyncBatchNorm)]
    what = f"SyncBatchNorm ({names[0]!r} and {len(names) - 1} more) sums" if names else None
    if getattr(model, "find_unused_parameters", False) and not getattr(model, "static_graph", False):
        what = what or "find_unused_parameters=True has DDP sum what was used"
    if what is not None:
        raise Unsupported(
            f"transport={NCCL}: {what} over NCCL during backward, and two communicators on one GPU can wait for each "
            f"other for ever. Leave it out, or set {TRANSPORT}={GLOO}"
        )


def reason_against(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Why these ranks cannot exchange data over NCCL; None if nothing is known against it."""
    if device.type != "cuda":
        return f"NCCL carries data between GPUs, and the gradients are on {device}"
    if not dist.is_nccl_available():
        return "this torch was built without NCCL"
    try:
        backend = group._get_backend(device).name()
    except RuntimeError:
        backend = "none"
    if backend != "nccl":
        return f"the process group's backend for {device.type} is {backend}, and NCCL may not work here"
    try:
        nccl.version()
    except Unsupported as error:
        return str(error)
    return None
