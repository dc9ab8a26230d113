"""Paired runs of tasks of tasks.py, one run at a time: a pretrained BERT on SST-2, and GPT-2 of 124 M parameters."""

from __future__ import annotations

import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from .noise import Layout
from .paired import EVALUATIONS, Clock, Exchange, Row, Variant, name_of, often
from .tasks import Gpt124, Sst2, Task, triangle
from .texts import sentences
from .training import WorkerGradients, set_rate

SHAPED_FROM = 4  # steps, after which second moments shape the grid
KINDS = ("plain", "noise", "integers", "fp8", "bf16")


class PairedSst2(Sst2):
    """Evaluated by the loss of 2,693 whole sentences: GLUE's dev part and the labelled test part."""

    def __init__(self, root: Path, device: torch.device, seed: int, limit: int | None) -> None:
        super().__init__(root, device, seed, limit)
        x, y = (torch.from_numpy(a)[:limit].to(device) for a in sentences(root, "test", self.length))
        self.x_dev, self.y_dev = torch.cat([self.x_dev, x]), torch.cat([self.y_dev, y])

    def evaluate(self) -> float:
        self.model.eval()
        with torch.no_grad(), self.cast():
            logits = torch.cat([self.model(x).float() for x in self.x_dev.split(128)])
        self.model.train()
        self.accuracy = 100 * float((logits.argmax(1) == self.y_dev).double().mean())
        return float(F.cross_entropy(logits.double(), self.y_dev))


class PairedGpt124(Gpt124):
    """The rate falls to 0, so that losses at the end do not depend on the last batches."""

    def __init__(self, root: Path, device: torch.device, seed: int, limit: int | None) -> None:
        super().__init__(root, device, seed, limit)
        if limit is not None:
            self.steps = max(1, limit // (self.workers * self.batch))

    def rate(self, epoch: float) -> float:
        return triangle(6e-4, epoch, 0.1, 1.0)


PAIRED_TASKS: dict[str, type[Task]] = {"sst2": PairedSst2, "gpt2": PairedGpt124}


def train_task(
    task: str, seed: int, variant: Variant, root: Path, device: torch.device, *, limit: int | None = None,
    deadline: float = math.inf, kernels: bool = False,
) -> list[Row]:  # fmt: skip
    """The row of one run. `limit`: the tiny form of the task, with so many samples."""
    return train(PAIRED_TASKS[task](root, device, seed, limit), task, seed, variant, deadline, kernels)


def train(
    task: Task, name: str, seed: int, variant: Variant, deadline: float = math.inf, kernels: bool = False
) -> list[Row]:
    if variant.kind not in KINDS or variant.batch != 1:
        raise ValueError(f"{variant.name}: tasks of this file have {', '.join(KINDS)}, and one size of batch")
    began, model, optimizer, device = time.monotonic(), task.model, task.optimizer, task.device
    named = dict(model.named_parameters())
    layout = Layout({key: tuple(p.shape) for key, p in named.items()}, task.workers, device)
    stack = torch.zeros(1, task.workers, layout.length, device=device)
    rows = [layout.views(stack[0, rank]) for rank in range(task.workers)]
    gradients = WorkerGradients(model, task.loss, rows, task.graph and device.type == "cuda")
    total = task.steps * task.epochs
    steps = max(1, round(total * variant.length))
    exchange = Exchange(layout, [(seed, variant)], total, kernels)
    moments = torch.zeros(1, layout.length, device=device)
    of_parameters = layout.views(moments[0])
    kept, seen, clock = list[torch.Tensor](), list[float](), Clock(steps, deadline, device)
    for step in range(steps):
        clock.look(step)
        set_rate(optimizer, variant.rate * task.rate(step / steps * task.epochs))
        kept.append(gradients(task.batches(step // task.steps, step % task.steps)))
        with torch.no_grad():
            shaped = step >= SHAPED_FROM and all("exp_avg_sq" in optimizer.state[p] for p in named.values())
            if shaped:
                torch._foreach_copy_(of_parameters, [optimizer.state[p]["exp_avg_sq"] for p in named.values()])
            mean = exchange(stack, moments if shaped else None, None)
            for p, g in zip(named.values(), layout.views(mean[0])):
                p.grad = g
            optimizer.step()
        if often(step + 1, steps, EVALUATIONS) and step + 1 < steps:
            seen.append(task.evaluate())
    seen.append(task.evaluate())
    curve = torch.stack(kept).double().cpu()
    accuracy = getattr(task, "accuracy", None)
    return [exchange.measured()[0] | {
        "task": name, "seed": seed, "workers": task.workers, "loss": f"{seen[-1]:.7f}",
        "accuracy": "" if accuracy is None else f"{accuracy:.2f}",
        "train_loss": f"{float(curve[int(0.9 * len(curve)) :].mean()):.7f}", "limit": task.limit or "", "beside": 1,
        "losses": " ".join(f"{loss:.6f}" for loss in seen), "seconds": round(time.monotonic() - began, 2),
        "device": name_of(device),
    }]  # fmt: skip
