"""A real gradient with the state of its optimizer, for `gradzip bench net --input FILE`.

    python experiments/gcomp/gradient.py --task gcomp-sst2-adamw --data DATA minilm-sst2.pt

One worker trains the task by AdamW, whose state near mode's grid needs, for some steps; the file holds what an exchange
would meet at the last of them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from workers.tasks import TASKS


def snapshot(name: str, root: Path, steps: int, batch: int, lr: float) -> dict[str, object]:
    base, device = TASKS[name], torch.device("cuda" if torch.cuda.is_available() else "cpu")
    task = type(base.__name__, (base,), {"workers": 1, "batch": batch})(root, device, 0, None)
    parameters = list(task.model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=lr)
    for step in range(steps):
        (part,) = task.batches(step // task.steps, step % task.steps)
        loss = task.loss(*part)
        optimizer.zero_grad()
        loss.backward()
        if step + 1 < steps:
            optimizer.step()
        print(f"step {step + 1}: loss {float(loss):.3f}", flush=True)

    def flat(tensors: list[torch.Tensor]) -> torch.Tensor:
        return nn.utils.parameters_to_vector(tensors).detach().cpu().clone()

    return {
        "step": steps, "loss": float(loss), "lr": lr, "gradient": flat([p.grad for p in parameters]),
        "theta": flat(parameters), "first": flat([optimizer.state[p]["exp_avg"] for p in parameters]),
        "second": flat([optimizer.state[p]["exp_avg_sq"] for p in parameters]),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--task", choices=list(TASKS), required=True)
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-4)
    options = parser.parse_args()
    torch.save(snapshot(options.task, options.data, options.steps, options.batch, options.lr), options.out)


if __name__ == "__main__":
    main()
