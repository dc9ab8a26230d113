"""Hugging Face Accelerate: attach after prepare(); save_state and load_state then include gradzip's state.

pip install accelerate
torchrun --nproc-per-node 2 examples/accelerate_train.py
"""

from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gradzip.integrations.accelerate import attach


def main(folder: str = "checkpoint") -> None:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 1))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data: Any = DataLoader(TensorDataset(torch.randn(640, 64)), batch_size=32)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)

    handle = attach(accelerator, model, optimizer)

    for (x,) in data:
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()

    accelerator.save_state(folder)
    accelerator.load_state(folder)
    accelerator.print(f"loss {loss.item():.3f}, {handle.stats()['ratio']:.2f}x fewer bytes, saved in {folder}")
    handle.detach()
    accelerator.end_training()


if __name__ == "__main__":
    main()
