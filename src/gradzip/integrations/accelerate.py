"""Hugging Face Accelerate: `handle = attach(accelerator, model, optimizer)` after `accelerator.prepare`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from .. import hooks
from ..codecs import Codec
from ..hooks import Handle
from ..option import Option
from ..policy import Policy
from . import files

try:
    from accelerate import Accelerator
except ImportError as error:
    raise ImportError("gradzip.integrations.accelerate needs Accelerate: pip install accelerate") from error

__all__ = ["attach"]


def attach(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    policy: str | Codec | Option | Policy | None = None,
    **settings: Any,
) -> Handle:
    """`gradzip.attach` for what `accelerator.prepare` returned. Call it on all ranks, before `accelerator.load_state`.

    From now on `accelerator.save_state` and `load_state` include the handle's state, of every rank. The accelerator's
    GradScaler is used where it has one; `settings` are those of `gradzip.attach`.
    """
    handle = hooks.attach(model, optimizer, policy, **{"scaler": accelerator.scaler} | settings)
    number = _attached[accelerator] = _attached.get(accelerator, -1) + 1
    name = f"gradzip_{number}" if number else "gradzip"  # as Accelerate numbers a second model's files
    registered = (
        accelerator.register_save_state_pre_hook(lambda models, weights, folder: files.save(handle, folder, name)),
        accelerator.register_load_state_pre_hook(lambda models, folder: files.load(handle, folder, name)),
    )
    leave = handle.on_detach

    def detached() -> None:
        for each in registered:
            each.remove()
        if leave is not None:
            leave()

    handle.on_detach = detached
    return handle


_attached: WeakKeyDictionary[Accelerator, int] = WeakKeyDictionary()  # the number of the last handle of each
