"""attach(model, optimizer, "auto"): it profiles, plans, switches, checks, and resumes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import TIMEOUT, run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradzip
from gradzip.errors import PlanError
from gradzip.planner import auto
from gradzip.planner.answer import Answer, Request
from gradzip.planner.auto import Auto

STEPS = 40


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("auto", Auto()),
        ("auto:lossy=true", Auto(lossy=True)),
        ("auto:codecs=gcomp,powersgd:rank=2", Auto(codecs=("gcomp", "powersgd:rank=2"))),
        ("auto:codecs=cast,topk,save=,lossy=true", Auto(True, ("cast", "topk"), "")),
    ],
)
def test_text_form(text: str, expected: Auto) -> None:
    assert Auto.parse(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("auto:lossi=true", "did you mean 'lossy'"),
        ("auto:lossy=maybe", "true or false"),
        ("auto:lossy=true,lossy=true", "twice"),
        ("automatic", "is not auto"),
    ],
)
def test_bad_text(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Auto.parse(text)


def test_default_codecs_are_harmless() -> None:
    assert Auto().offered() == auto.HARMLESS
    assert "topk" in Auto(lossy=True).offered()


def _start(policy: str) -> tuple[DistributedDataParallel, torch.optim.Optimizer, gradzip.Handle]:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return model, optimizer, gradzip.attach(model, optimizer, policy, timeout=TIMEOUT)


REAL_ANSWER = auto.answer


def _answer(gain: float, request: Request) -> Answer:
    """`cast` for everything, and the promise that it gains so much."""
    real = REAL_ANSWER(request)
    plan = real.problem.uniform(gradzip.Option("cast", "cpu", "allreduce"))
    free = replace(real.timeline, events=())  # of processors, too
    return replace(
        real, found=replace(real.found, plan=plan), timeline=free, step_s=real.plain_s / gain, uncertainty=0.0
    )


class Clock:
    """What the pilot reads; steps take as long as the test wants."""

    now = 0.0

    def read(self) -> float:
        self.now += 1e-6
        return self.now


def _train(rank: int) -> dict[str, Any]:
    """Three runs: what is chosen is decided by the test, by the times that the pilot reads."""
    found: dict[str, Any] = {}
    for name, gain, planned_s in (("stays", 2.0, 0.01), ("reverts", 2.0, 0.05), ("plain", 0.5, 0.0)):
        model, optimizer, handle = _start("auto:save=,codecs=cast")
        pilot = handle.pilot
        assert pilot is not None
        said, clock = list[str](), Clock()
        pilot._say_to, pilot._recorder._mark = said.append, clock.read  # type: ignore[method-assign]
        auto.answer = partial(_answer, gain)  # type: ignore[assignment]
        try:
            for step in range(STEPS):
                rng = torch.Generator().manual_seed(step * 2 + rank)
                optimizer.zero_grad()
                model(torch.randn(4, 64, generator=rng)).square().mean().backward()
                clock.now += 0.02 if pilot.plan is None else planned_s
                optimizer.step()
        finally:
            auto.answer = REAL_ANSWER
        state = handle.state_dict()
        handle.detach()
        found[name] = {
            "said": said,
            "reverted": pilot.reverted,
            "codec": handle._policy.option("0.weight", (256, 64)).codec,
            "sum": float(sum(p.detach().double().sum() for p in model.parameters())),
            "keys": sorted(k for k in state if k.startswith("auto")),
        }
        if name == "stays":
            model, optimizer, again = _start("auto:save=,codecs=cast")
            assert again.pilot is not None
            again.pilot._say_to = said.append
            again.load_state_dict(state)
            found["resumed"] = again._policy.option("0.weight", (256, 64)).codec
            again.detach()
    with pytest.raises(gradzip.Unsupported, match="optimizer's steps"):
        gradzip.attach(model, None, "auto")
    dist.barrier()
    return found


def test_a_plan_stays_or_goes_by_what_is_measured() -> None:
    first, second = run_ranks(2, _train)
    assert first["stays"]["codec"] == "cast"
    assert "from step 15 on: cast, expected" in first["stays"]["said"][0]
    assert "the plan stays" in first["stays"]["said"][1]
    assert first["reverts"]["reverted"]
    assert "back to plain" in first["reverts"]["said"][1]
    assert first["reverts"]["codec"] == "identity"
    assert first["plain"]["codec"] == "identity"
    assert "plain averaging: compression would not shorten" in first["plain"]["said"][0]
    assert first["resumed"] == "cast"
    assert first["stays"]["keys"] == ["auto.plan"]
    assert second["stays"]["said"] == []
    for name in ("stays", "reverts", "plain"):
        assert first[name]["sum"] == second[name]["sum"], "replicas differ"
