"""EFMomentum against a plain transcription of PowerSGD's Algorithm 2."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from conftest import generator

import gradzip
from gradzip.errors import Unsupported
from gradzip.optim import EFMomentum


def parameters(seed: int = 0) -> list[torch.nn.Parameter]:
    rng = generator(seed)
    return [torch.nn.Parameter(torch.randn(s, generator=rng)) for s in ((3, 4), (5,), (), (2, 3, 2))]


def gradients(step: int) -> list[torch.Tensor]:
    rng = generator(1000 + step)
    return [torch.randn(s, generator=rng) for s in ((3, 4), (5,), (), (2, 3, 2))]


def transcribed(x: list[torch.Tensor], steps: int, lr: float, momentum: float, decay: float) -> list[torch.Tensor]:
    m: list[torch.Tensor] | None = None
    for step in range(steps):
        d = [g + decay * p for g, p in zip(gradients(step), x)]
        m = d if m is None else [momentum * mi + di for mi, di in zip(m, d)]
        x = [p - lr * (di + mi) for p, di, mi in zip(x, d, m)]
    return x


def run(optimizer: EFMomentum, params: list[torch.nn.Parameter], first: int, last: int) -> None:
    for step in range(first, last):
        for p, g in zip(params, gradients(step)):
            p.grad = g.clone()
        optimizer.step()


@pytest.mark.parametrize("foreach", [None, False, True])
@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_it_is_the_algorithm(foreach: bool | None, decay: float) -> None:
    params = parameters()
    expected = transcribed([p.detach().clone() for p in params], 7, 0.05, 0.9, decay)
    optimizer = EFMomentum(params, lr=0.05, momentum=0.9, weight_decay=decay, foreach=foreach)
    run(optimizer, params, 0, 7)
    for p, e in zip(params, expected):
        assert torch.allclose(p, e, atol=1e-6)


def test_gradients_are_left_as_they_are() -> None:
    for foreach in (False, True):
        params = parameters()
        run(EFMomentum(params, weight_decay=0.1, foreach=foreach), params, 0, 1)
        assert all(torch.equal(p.grad, g) for p, g in zip(params, gradients(0)) if p.grad is not None)


def test_it_resumes() -> None:
    straight, broken = parameters(), parameters()
    optimizer = EFMomentum(straight, lr=0.03)
    run(optimizer, straight, 0, 6)
    first = EFMomentum(broken, lr=0.03)
    run(first, broken, 0, 3)
    second = EFMomentum(broken, lr=0.5)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    run(second, broken, 3, 6)
    assert all(torch.equal(a, b) for a, b in zip(straight, broken))


def test_groups_schedulers_closures_and_missing_gradients() -> None:
    params = parameters()
    groups: list[dict[str, Any]] = [{"params": params[:2], "lr": 0.0}, {"params": params[2:]}]
    optimizer = EFMomentum(groups, lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
    before = [p.detach().clone() for p in params]
    for p, g in zip(params[:3], gradients(0)):
        p.grad = g

    def closure() -> float:
        assert torch.is_grad_enabled()
        return 7.0

    assert optimizer.step(closure) == 7.0
    scheduler.step()
    assert optimizer.param_groups[1]["lr"] == pytest.approx(0.01)
    assert [torch.equal(p, b) for p, b in zip(params, before)] == [True, True, False, True]


@pytest.mark.parametrize("bad", [{"lr": -1}, {"momentum": 1}, {"momentum": -0.1}, {"weight_decay": -1}])
def test_nonsense_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(Unsupported, match=next(iter(bad))):
        EFMomentum(parameters(), **bad)


def test_sparse_gradients_are_refused() -> None:
    embedding = torch.nn.Embedding(5, 3, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(Unsupported, match="dense"):
        EFMomentum(embedding.parameters()).step()


def test_it_is_a_public_name() -> None:
    assert gradzip.optim.EFMomentum is EFMomentum
