"""Every biased codec, with error feedback, solves a least-squares problem whose data is spread over four ranks.

The ranks disagree: at the solution their gradients cancel, and none of them is zero. So an error that is not fed back
keeps its codec away from the solution.
"""

from __future__ import annotations

import pytest
import torch
from conftest import generator
from simulated import Workers

from gradzip import parse, rules
from gradzip.codecs import REGISTRY

WORLD, STEPS = 4, 250

# By codec: the part of the initial gap to the best loss that may be left.
BIASED = {
    "topk:ratio=0.05": 2e-4,
    "randomk:ratio=0.1": 0.05,
    "randomblock:ratio=0.1": 0.1,
    "threshold:value=0.3": 1e-5,
    "sign": 1e-4,
    "onebit": 1e-4,
    "terngrad:clip=2.5": 5e-3,
    "powersgd:rank=1": 5e-4,
    "powersgd:rank=2,alternate=true": 1e-3,
    "gcomp:keep=0": 1e-6,
    "gcomp:keep=2,round=truncate": 1e-6,
    "gcomp:ulps=4194304": 1e-4,
}
OTHERS = {"identity": 1e-4, "dgc:ratio=0.05,momentum=0.5": 1e-2, "qsgd:bits=4": 1e-3, "natural": 1e-3, "cast": 1e-3}


class LeastSquares:
    """Each rank has its own equations; x is a 20 x 30 matrix."""

    def __init__(self) -> None:
        rng = generator(5)
        self.a = torch.randn(WORLD, 40, 20, generator=rng)
        self.b = torch.randn(WORLD, 40, 30, generator=rng)
        every_a, every_b = self.a.view(-1, 20).double(), self.b.view(-1, 30).double()
        self.best = self.loss(torch.linalg.lstsq(every_a, every_b).solution)

    def loss(self, x: torch.Tensor) -> float:
        return float((self.a.double() @ x.double() - self.b.double()).square().sum()) / 2 / WORLD / 40

    def gradients(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [a.T @ (a @ x - b) / 40 for a, b in zip(self.a, self.b)]


def gap_left(spec: str) -> float:
    """Gap to the best loss at the end, over the gap at the start."""
    problem, workers = LeastSquares(), Workers(WORLD)
    x = torch.nn.Parameter(torch.randn(20, 30, generator=generator(6)))
    optimizer = torch.optim.SGD([x], lr=0.2)
    near = parse(spec).name == "gcomp" and parse(spec).mode == "near"  # type: ignore[attr-defined]
    start = problem.loss(x.detach()) - problem.best
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = 0.2 * (1 - step / STEPS)
        floors = rules(optimizer, parse(spec).ulps) if near else {}  # type: ignore[attr-defined]
        gradients = problem.gradients(x.detach())
        x.grad = workers.mean({"x": gradients}, {"x": spec}, {"x": floors.get(x)})["x"]
        optimizer.step()
    return (problem.loss(x.detach()) - problem.best) / start


@pytest.mark.parametrize("spec", BIASED)
def test_biased_codecs_reach_the_solution_with_feedback(spec: str) -> None:
    assert parse(spec).biased
    assert gap_left(spec) < BIASED[spec]


@pytest.mark.parametrize("spec", OTHERS)
def test_the_others_reach_it_without(spec: str) -> None:
    assert parse(spec).error_memory is None
    assert gap_left(spec) < OTHERS[spec]


@pytest.mark.parametrize("spec", ["topk:ratio=0.05", "sign", "powersgd:rank=1", "gcomp:keep=0"])
def test_without_feedback_biased_codecs_do_not(spec: str) -> None:
    """Else the tests above would show nothing."""
    assert gap_left(f"{spec},feedback=false" if ":" in spec else f"{spec}:feedback=false") > 10 * BIASED[spec]


def test_no_biased_codec_is_left_out() -> None:
    tested = {parse(spec).name for spec in BIASED}
    for name, cls in REGISTRY.items():
        if cls.__module__.startswith("gradzip.") and cls().biased:
            assert name in tested
