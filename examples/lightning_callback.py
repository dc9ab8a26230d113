"""PyTorch Lightning: a callback that attaches, keeps the handle's state in checkpoints, and fails loudly.

pip install lightning
torchrun --nproc-per-node 2 examples/lightning_callback.py
"""

from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import gradzip


class GradzipCallback(L.Callback):
    """Lightning's own `ddp_comm_hook` is skipped without a word on the CPU; this one raises where it cannot work."""

    def __init__(self, policy: str = "gcomp") -> None:
        self.policy = policy
        self.handle: gradzip.Handle | None = None
        self.saved: dict[str, Any] | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        model = trainer.strategy.model
        if not isinstance(model, DistributedDataParallel):
            raise RuntimeError(f"GradzipCallback needs strategy='ddp', not {type(trainer.strategy).__name__}")
        self.handle = gradzip.attach(model, trainer.optimizers[0], self.policy)
        if self.saved is not None:
            self.handle.load_state_dict(self.saved[str(dist.get_rank())])

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.handle is not None:
            self.handle.detach()

    def state_dict(self) -> dict[str, Any]:
        """Called on all ranks; rank 0 writes, so it needs what the others hold."""
        if self.handle is None:
            return {}
        states: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(states, self.handle.state_dict())
        return {str(rank): state for rank, state in enumerate(states)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.saved = state_dict


class Regression(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 1))

    def training_step(self, batch: tuple[torch.Tensor, ...], index: int) -> torch.Tensor:
        return (self.net(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


if __name__ == "__main__":
    data = DataLoader(TensorDataset(torch.randn(640, 64)), batch_size=32)
    callback = GradzipCallback("gcomp:keep=7")
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    strategy = DDPStrategy(process_group_backend="gloo")
    trainer = L.Trainer(max_epochs=2, accelerator="cpu", devices=2, strategy=strategy, callbacks=[callback], **quiet)
    trainer.fit(Regression(), data)
    if trainer.is_global_zero and callback.handle is not None:
        print(f"{trainer.global_step} steps, {callback.handle.stats()['ratio']:.2f}x fewer bytes")
