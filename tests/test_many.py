"""experiments/workers/many.py: all runs and workers as one model compute what each would alone."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.append(str(Path(__file__).parent.parent / "experiments"))
from workers.many import Adam, Stack
from workers.texts import Gpt

CPU = torch.device("cpu")


def model(seed: int = 0) -> Gpt:
    torch.manual_seed(seed)
    return Gpt(50, 32, 2, 2, 16)


def test_each_workers_gradient_is_that_of_the_single_model() -> None:
    stack = Stack(model(), 3, 2, CPU, 2, at_once=2)
    stack.values[1] *= 1.1
    window = torch.randint(50, (2, 4, 17), generator=torch.Generator().manual_seed(1))
    weights = torch.full((3, 4), 0.25)
    weights[2] = torch.tensor([0.5, 0.5, 0.0, 0.0])  # the third run has half the batch
    losses = stack.backward(window, weights)
    for run in range(3):
        single = model()
        for p, value in zip(single.parameters(), stack.layout.views(stack.values[run])):
            p.data.copy_(value)
        for rank in range(2):
            texts = window[rank, : 2 if run == 2 else 4]
            loss = F.cross_entropy(single(texts[:, :-1]).flatten(0, 1), texts[:, 1:].flatten())
            gradients = torch.autograd.grad(loss, list(single.parameters()))
            for found, expected in zip(stack.layout.views(stack.gradients[run, rank]), gradients):
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert losses.shape == (3,)
    assert not stack.gradients[..., ~stack.layout.valid].any()


def test_adam_is_torchs_adamw() -> None:
    stack, single = Stack(model(), 2, 1, CPU, 2, at_once=2), model()
    ours = Adam(stack, (0.9, 0.95), 0.1)
    matrices = [p for p in single.parameters() if p.dim() > 1]
    vectors = [p for p in single.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    theirs = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    rng = torch.Generator().manual_seed(2)
    for _ in range(5):
        mean = torch.zeros_like(stack.values)
        for p, view in zip(single.parameters(), stack.layout.views(mean)):
            p.grad = torch.randn(p.shape, generator=rng)
            view.copy_(p.grad)
        theirs.step()
        ours.step(mean, torch.tensor([1e-3, 2e-3]))
    views = stack.layout.views(stack.values)
    for p, view in zip(single.parameters(), views):
        torch.testing.assert_close(view[0], p.detach(), rtol=1e-5, atol=1e-7)
    assert not torch.equal(views[0][0], views[0][1])  # the second run has another rate
