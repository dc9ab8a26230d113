"""Hugging Face Trainer: a callback that attaches when training begins and saves with every checkpoint.

pip install 'transformers[torch]'
torchrun --nproc-per-node 2 examples/trainer_callback.py
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainerCallback, TrainingArguments

import gradzip


class GradzipCallback(TrainerCallback):
    """`callback.trainer = trainer` before train(): callbacks are handed the model without its DDP wrapper."""

    def __init__(self, policy: str = "gcomp") -> None:
        self.policy = policy
        self.trainer: Trainer | None = None
        self.handle: gradzip.Handle | None = None

    def on_train_begin(self, args: TrainingArguments, state: Any, control: Any, **more: Any) -> None:
        model = None if self.trainer is None else self.trainer.model_wrapped
        if not isinstance(model, DistributedDataParallel):
            raise RuntimeError("GradzipCallback needs callback.trainer = trainer, and more than one rank (torchrun)")
        self.handle = gradzip.attach(model, more["optimizer"], self.policy)
        saved = self._file(args, state.global_step)
        if saved.exists():
            self.handle.load_state_dict(torch.load(saved, weights_only=True))

    def on_save(self, args: TrainingArguments, state: Any, control: Any, **more: Any) -> None:
        assert self.handle is not None
        path = self._file(args, state.global_step)
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(self.handle.state_dict(), path)

    def on_train_end(self, args: TrainingArguments, state: Any, control: Any, **more: Any) -> None:
        if self.handle is not None:
            self.handle.detach()

    @staticmethod
    def _file(args: TrainingArguments, step: int) -> Path:
        return Path(str(args.output_dir)) / f"checkpoint-{step}" / f"gradzip-{args.process_index}.pt"


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
    callback = GradzipCallback("gcomp:keep=7")
    data = [{"x": torch.randn(64)} for _ in range(640)]
    callback.trainer = Trainer(Regression(), arguments, train_dataset=data, callbacks=[callback])
    callback.trainer.train()
    if arguments.process_index == 0 and callback.handle is not None:
        print(f"{callback.trainer.state.global_step} steps, {callback.handle.stats()['ratio']:.2f}x fewer bytes")
