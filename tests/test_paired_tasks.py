"""experiments/workers/paired_tasks.py: plain runs are DDP's arithmetic, and noisy ones are paired with them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.append(str(Path(__file__).parent.parent / "experiments"))
from workers import paired_tasks
from workers.noise import Layout, noisy_mean, shape_of
from workers.paired import FIELDS, Exchange, Variant
from workers.tasks import Task
from workers.training import Batch

CPU = torch.device("cpu")
PLAIN, NOISE = Variant("plain"), Variant("noise 10 %", "noise", 0.1)


class Regression(Task):
    """Targets of a fixed matrix, 2 workers with 16 samples each."""

    workers, epochs, batch, steps = 2, 2, 16, 6

    def __init__(self, seed: int = 0) -> None:
        super().__init__(Path(), CPU, seed, None)
        self.model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.goal = torch.randn(32, 8, generator=torch.Generator().manual_seed(7))

    def batches(self, epoch: int, step: int) -> Iterator[Batch]:
        for _ in range(self.workers):
            x = torch.randn(self.batch, 32, generator=self.rng)
            yield x, x @ self.goal

    def loss(self, *batch: torch.Tensor) -> torch.Tensor:
        x, y = batch
        return (self.model(x) - y).square().mean()

    def evaluate(self) -> float:
        x = torch.randn(64, 32, generator=torch.Generator().manual_seed(9))
        with torch.no_grad():
            return float((self.model(x) - x @ self.goal).square().mean())

    def rate(self, epoch: float) -> float:
        return 1e-2 * (1 - epoch / self.epochs)


def by_hand(task: Regression, noisy: bool) -> Regression:
    """The same steps with each worker's gradient kept by itself."""
    parameters, total = dict(task.model.named_parameters()), task.steps * task.epochs
    layout = Layout({name: tuple(p.shape) for name, p in parameters.items()}, task.workers, CPU)
    seeds = Exchange(layout, [(0, NOISE)], total, False)._seeds
    for step in range(total):
        for group in task.optimizer.param_groups:
            group["lr"] = task.rate(step / total * task.epochs)
        stack = torch.zeros(1, task.workers, layout.length)
        for worker, batch in enumerate(task.batches(0, step)):
            found = torch.autograd.grad(task.loss(*batch), list(parameters.values()))
            for view, gradient in zip(layout.views(stack[0, worker]), found):
                view.copy_(gradient)
        mean = (stack[:, 0] + stack[:, 1]) / 2
        if noisy:
            shape = None
            if step >= 4:
                moments = torch.zeros(1, layout.length)
                for view, p in zip(layout.views(moments[0]), parameters.values()):
                    view.copy_(task.optimizer.state[p]["exp_avg_sq"])
                shape = shape_of(layout, moments)
            mean = noisy_mean(layout, stack, shape, torch.tensor([0.1], dtype=torch.float64), seeds, step).mean
        for p, gradient in zip(parameters.values(), layout.views(mean[0])):
            p.grad = gradient
        task.optimizer.step()
    return task


@pytest.mark.parametrize("variant", [PLAIN, NOISE], ids=lambda variant: variant.name)
def test_a_run_is_the_loop_written_out(variant: Variant) -> None:
    task = Regression()
    (row,) = paired_tasks.train(task, "regression", 0, variant)
    expected = by_hand(Regression(), variant is NOISE)
    for p, q in zip(task.model.parameters(), expected.model.parameters()):
        assert torch.equal(p, q)
    assert float(row["loss"]) == pytest.approx(expected.evaluate(), abs=1e-6)
    assert set(FIELDS) == set(row)


def test_noise_keeps_its_budget_and_differs_from_plain() -> None:
    (plain,), (noisy,) = (paired_tasks.train(Regression(), "regression", 0, v) for v in (PLAIN, NOISE))
    assert float(plain["share"]) == 0
    assert 0 < float(noisy["share"]) <= 0.1
    assert noisy["loss"] != plain["loss"]
    assert float(noisy["loss"]) == pytest.approx(float(plain["loss"]), rel=0.2)


@pytest.mark.parametrize("variant", [Variant("gauss", "gauss", 0.1), Variant("batch", batch=0.5)])
def test_a_variant_that_would_be_ignored_is_refused(variant: Variant) -> None:
    with pytest.raises(ValueError, match=variant.name):
        paired_tasks.train(Regression(), "regression", 0, variant)
