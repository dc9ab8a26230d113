"""experiments/workers/many.py: all runs and workers as one model compute what each would alone."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

sys.path.append(str(Path(__file__).parent.parent / "experiments"))
from workers.many import Adam, Muon, Stack, orthogonal
from workers.texts import Gpt

CPU = torch.device("cpu")


def model(rotary: bool = False, seed: int = 0) -> Gpt:
    torch.manual_seed(seed)
    return Gpt(50, 32, 2, 2, 16, rotary)


@pytest.mark.parametrize("rotary", [False, True])
def test_each_workers_gradient_is_that_of_the_single_model(rotary: bool) -> None:
    stack = Stack([model(rotary), model(rotary, 5), model(rotary)], 2, CPU, 2, at_once=2)
    window = torch.randint(50, (3, 2, 4, 17), generator=torch.Generator().manual_seed(1))
    weights = torch.full((3, 4), 0.25)
    weights[2] = torch.tensor([0.5, 0.5, 0.0, 0.0])  # the third run has half the batch
    losses = stack.backward(window, weights)
    for run in range(3):
        single = model(rotary)
        for p, value in zip(single.parameters(), stack.layout.views(stack.values[run])):
            p.data.copy_(value)
        for rank in range(2):
            texts = window[run, rank, : 2 if run == 2 else 4]
            loss = F.cross_entropy(single(texts[:, :-1]).flatten(0, 1), texts[:, 1:].flatten())
            gradients = torch.autograd.grad(loss, list(single.parameters()))
            for found, expected in zip(stack.layout.views(stack.gradients[run, rank]), gradients):
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert losses.shape == (3,)
    assert not stack.gradients[..., ~stack.layout.valid].any()


def test_adam_is_torchs_adamw() -> None:
    stack, single = Stack([model()] * 2, 1, CPU, 2, at_once=2), model()
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


def test_muon_turns_each_matrix_alone_and_keeps_its_rows_and_columns() -> None:
    """Matrices of one shape go through the iteration together; the result is that of one at a time."""
    stack = Stack([model(), model(seed=1)], 1, CPU, 2, at_once=2)
    layout, rates = stack.layout, torch.tensor([1e-2, 2e-2])
    muon = Muon(stack, (0.9, 0.95), 0.1, 10.0, by_momentum=[False, True])
    t, rng = layout.names.index("blocks.1.up.weight"), torch.Generator().manual_seed(3)
    momentum = torch.zeros(2, *layout.shapes[t])
    for _ in range(2):
        mean = torch.where(layout.valid, torch.randn(2, layout.length, generator=rng), 0.0)
        before, g = layout.views(stack.values)[t].clone(), layout.views(mean)[t]
        muon.step(mean, rates)
        momentum = momentum.lerp(g, 0.05)
        for run in range(2):
            turned = orthogonal(g[run : run + 1].lerp(momentum[run : run + 1], 0.95))[0]
            expected = before[run] - rates[run] * 10 * 2.0 * turned  # four times as many rows as columns
            torch.testing.assert_close(layout.views(stack.values)[t][run], expected, rtol=1e-2, atol=1e-3)
            squared = (momentum if run else g)[run].square()
            product = squared.mean(1, keepdim=True) * squared.mean(0, keepdim=True)
            torch.testing.assert_close(layout.views(muon.v)[t][run], product)
    assert layout.views(muon.v)[layout.names.index("norm.weight")].any()  # AdamW's own second moments
