"""Hugging Face Trainer: one callback compresses the gradients and keeps its state in the Trainer's checkpoints.

pip install 'transformers[torch]'
torchrun --nproc-per-node 2 examples/trainer_callback.py
"""

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from gradzip.integrations.transformers import GradzipCallback


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 1))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.net(x) - x.sum(1, keepdim=True)).square().mean()}


if __name__ == "__main__":
    torch.manual_seed(0)
    arguments = TrainingArguments(
        "out", max_steps=20, save_steps=20, use_cpu=True, ddp_backend="gloo", report_to=[], disable_tqdm=True
    )
    data = [{"x": torch.randn(64)} for _ in range(640)]
    trainer = Trainer(Regression(), arguments, train_dataset=data)
    callback = GradzipCallback(trainer, "gcomp:keep=7")
    trainer.add_callback(callback)
    trainer.train()
    if arguments.process_index == 0 and callback.handle is not None:
        print(f"{trainer.state.global_step} steps, {callback.handle.stats()['ratio']:.2f}x fewer bytes")
