"""Hugging Face Accelerate: attach after prepare(), and let it save the handle with everything else.

pip install accelerate
torchrun --nproc-per-node 2 examples/accelerate_train.py
"""

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gradzip


class State:
    """Accelerate saves registered objects on rank 0 alone; each rank's residuals go to a file of their own."""

    def __init__(self, handle: gradzip.Handle, rank: int, folder: Path) -> None:
        self.handle, self.path = handle, folder / f"gradzip-{rank}.pt"

    def save(self) -> None:
        torch.save(self.handle.state_dict(), self.path)

    def load(self) -> None:
        self.handle.load_state_dict(torch.load(self.path, weights_only=True))


def main(folder: str = "checkpoint") -> None:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 1))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data: Any = DataLoader(TensorDataset(torch.randn(640, 64)), batch_size=32)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)

    handle = gradzip.attach(model, optimizer, "gcomp")  # knows Accelerate's wrapper around the optimizer
    state = State(handle, accelerator.process_index, Path(folder))

    for (x,) in data:
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()

    accelerator.save_state(folder)
    state.save()
    accelerator.wait_for_everyone()
    accelerator.load_state(folder)
    state.load()
    accelerator.print(f"loss {loss.item():.3f}, {handle.stats()['ratio']:.2f}x fewer bytes, saved in {folder}")
    handle.detach()
    accelerator.end_training()


if __name__ == "__main__":
    main()
