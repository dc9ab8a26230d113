"""PyTorch Lightning: one callback compresses the gradients and keeps its state in Lightning's checkpoints.

pip install lightning
torchrun --nproc-per-node 2 examples/lightning_callback.py
"""

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gradzip.integrations.lightning import GradzipCallback


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
