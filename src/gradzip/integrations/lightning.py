"""PyTorch Lightning: `Trainer(strategy="ddp", callbacks=[GradzipCallback()])`.

Lightning Fabric needs no callback: gradzip.attach takes the model and the optimizer that fabric.setup returns.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ..codecs import Codec
from ..errors import Unsupported
from ..hooks import Handle, attach
from ..option import Option
from ..policy import Policy

try:
    import lightning.pytorch as pl
except ImportError as error:
    raise ImportError("gradzip.integrations.lightning needs Lightning: pip install lightning") from error

__all__ = ["GradzipCallback"]


class GradzipCallback(pl.Callback):
    """Compresses gradients while `Trainer.fit` runs, and keeps every rank's state in Lightning's checkpoints.

    `policy` and `settings` are those of `gradzip.attach`. `handle` is the Handle from the start of training on.
    """

    def __init__(self, policy: str | Codec | Option | Policy | None = None, **settings: Any) -> None:
        self.policy, self.settings = policy, settings
        self.handle: Handle | None = None
        self._saved: dict[str, Any] | None = None  # from a checkpoint, by rank

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            self._saved = None  # what `validate` or `test` loaded is not for this run

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        model = trainer.strategy.model
        if not isinstance(model, DistributedDataParallel):
            raise Unsupported(
                f"GradzipCallback works with strategy='ddp' on two or more devices, and this Trainer has "
                f"{type(trainer.strategy).__name__}, which makes no DistributedDataParallel model"
            )
        settings = {"scaler": getattr(trainer.strategy.precision_plugin, "scaler", None)} | self.settings
        self.handle = attach(model, trainer.optimizers, self.policy, **settings)
        if self._saved is not None or trainer.ckpt_path is not None:
            self.handle.resume((self._saved or {}).get(str(dist.get_rank())))
            self._saved = None

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.handle is not None:
            self.handle.detach()

    def state_dict(self) -> dict[str, Any]:
        """Every rank's state. Lightning calls this on all ranks, and rank 0 writes the checkpoint."""
        if self.handle is None:
            return {}
        own = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in self.handle.state_dict().items()}
        states: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(own, states)
        return {str(rank): state for rank, state in enumerate(states or ())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict
