"""attach and its handle: steps that fail, changes on the way, odd gradients, mistakes."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import TIMEOUT, run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import POLICIES, same, start

import gradzip
from gradzip import Fixed, Rules
from gradzip.errors import Unsupported
from gradzip.exchange.on_host.backward import ALONE

FEEDBACK = ("randomk", "topk", "powersgd", "near-4096", "mixed")


def skipped_step(name: str) -> dict[str, Any]:
    """A step with a NaN on rank 1 alone, between two good ones."""
    run = start(POLICIES[name])
    assert run.handle is not None
    run.train(0, 2)
    before = run.handle.state_dict()
    run.step(2, poison=float("nan"))
    finite = all(bool(g.isfinite().all()) for g in run.gradients())
    after = run.handle.state_dict()
    steps = before.pop("steps"), after.pop("steps")
    kept = before.keys() == after.keys() and all(
        torch.equal(torch.as_tensor(v), torch.as_tensor(after[k])) for k, v in before.items()
    )
    run.train(3, 5)
    good = all(bool(p.isfinite().all()) for p in run.parameters())
    return {"finite": finite, "kept": kept, "steps": steps, "good": good, "held": len(before)}


def changed_policy() -> dict[str, Any]:
    """topk, then lossless, which first sends what topk held back, then detached, then attached anew."""
    run, plain = start("topk:ratio=0.01"), start(None)
    assert run.handle is not None
    run.train(0, 2)
    held = [k for k in run.handle.state_dict() if "residual" in k]
    run.handle.set_policy("gcomp:mode=lossless")
    run.train(2, 4)
    left = [k for k in run.handle.state_dict() if "residual" in k]
    run.handle.detach()
    plain.model.load_state_dict(run.model.state_dict())
    plain.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    run.train(4, 6)
    plain.train(4, 6)
    detached = same(run.parameters(), plain.parameters())
    handle = gradzip.attach(run.model, run.optimizer, Fixed("gcomp:mode=lossless"), timeout=TIMEOUT)
    run.train(6, 8)
    plain.train(6, 8)
    return {
        "held": len(held),
        "left": len(left),
        "detached": detached,
        "attached": same(run.parameters(), plain.parameters()),
        "steps": handle.stats()["steps"],
    }


class Transposed(nn.Module):
    """A matrix product whose weight lies in memory column by column."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(40, 64).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def odd_layouts() -> dict[str, bool]:
    """Gradients that do not lie in row-major order. The transposed one has rank 4 at the most: 2 rows on 2 ranks."""
    exact = ("identity", "gcomp:mode=lossless")
    close = ("gcomp", "gcomp:mode=paper", "topk:ratio=1", "powersgd:rank=4")
    out, plain = {}, []
    for policy in ("none", *exact, *close):
        torch.manual_seed(3)
        net = nn.Sequential(nn.Conv2d(3, 64, 3), nn.Flatten(), nn.Linear(64 * 9, 64), Transposed())
        net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stubs lack memory_format
        assert not net[0].weight.is_contiguous()
        assert not net[3].weight.is_contiguous()
        model = DistributedDataParallel(net)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rules = Rules({"3.*" if "powersgd" in policy else "*": policy}) if policy != "none" else None
        if rules is not None:
            gradzip.attach(model, optimizer, rules, timeout=TIMEOUT)
        x = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(dist.get_rank()))
        for _ in range(2):
            optimizer.zero_grad()
            model(x.to(memory_format=torch.channels_last)).square().mean().backward()
            optimizer.step()
        ours = [p.detach().clone() for p in model.parameters()]
        plain = plain or ours
        near = all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(plain, ours))
        out[policy] = near if policy in close else same(plain, ours)
    return out


def nothing_is_lost(name: str) -> float:
    """The sum of all means sent, plus what all ranks still hold, against the sum of all gradients."""
    run, plain = start(POLICIES[name]), start(None)
    assert run.handle is not None
    sent, raw = [], []
    for number in range(5):  # without optimizer steps, so that both see the same gradients
        run.step(number)
        plain.step(number)
        sent.append(run.gradients())
        raw.append(plain.gradients())
    total = [torch.stack(t).sum(0) for t in zip(*raw)]
    error = 0.0
    for i, (key, parameter) in enumerate(run.model.module.named_parameters()):
        held = torch.zeros_like(parameter)
        for stage, residual in run.handle.state_dict().items():
            if not stage.startswith("rank") or not stage.endswith(f"/{key}"):
                continue
            where = stage.split("/")[2]  # gradient, or the part of a sum that this rank forms: sum1.0-640
            first, _, end = where.partition(".")[2].partition("-")
            held.view(-1)[int(first or 0) : int(end or held.numel())] += torch.as_tensor(residual).view(-1)
        dist.all_reduce(held)
        arrived = torch.stack([s[i] for s in sent]).sum(0)
        error = max(error, float((arrived + held / 2 - total[i]).norm() / total[i].norm()))
    return error


def sixteen_bits() -> list[bool]:
    """Gradients in bfloat16: sums are taken in float32."""
    out = []
    for policy in (Fixed("identity"), Fixed("gcomp:mode=lossless"), Fixed("topk:ratio=1")):
        torch.manual_seed(3)
        model = DistributedDataParallel(nn.Linear(64, 32).bfloat16())
        gradzip.attach(model, None, policy, timeout=TIMEOUT)
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(dist.get_rank())).bfloat16()
        model(x).square().mean().backward()
        mean = [p.grad for p in model.parameters()]
        alone = nn.Linear(64, 32).bfloat16()
        alone.load_state_dict(model.module.state_dict())
        alone(x).square().mean().backward()
        gathered: list[Any] = [None, None]
        dist.all_gather_object(gathered, [p.grad for p in alone.parameters()])
        expected = [((a.float() + b.float()) / 2).bfloat16() for a, b in zip(*gathered)]
        out.append(same(mean, expected))
    return out


class Scaler:
    """Stands in for a GradScaler whose scale the test sets."""

    scale = 1.0

    def get_scale(self) -> float:
        return self.scale


def loss_scale() -> float:
    """Residuals under a changing loss scale: what is sent must not depend on it."""
    sent = []
    for scales in ([1.0] * 4, [1024.0, 2.0, 65536.0, 1.0]):
        torch.manual_seed(3)
        model, scaler = DistributedDataParallel(nn.Linear(64, 32, bias=False)), Scaler()
        gradzip.attach(model, None, Fixed("topk:ratio=0.1"), scaler=scaler, timeout=TIMEOUT)  # type: ignore[arg-type]
        steps = []
        for number, scaler.scale in enumerate(scales):
            x = torch.randn(4, 64, generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))
            model.zero_grad()
            (model(x).square().mean() * scaler.scale).backward()
            steps.append(model.module.weight.grad / scaler.scale)
        sent.append(torch.stack(steps))
    return float((sent[0] - sent[1]).abs().max() / sent[0].abs().max())


def alone() -> bool:
    """A group of one rank: nothing to average, and nothing is lost."""
    groups = [dist.new_group([r]) for r in (0, 1)]
    torch.manual_seed(3)
    net = nn.Linear(64, 32)
    model = DistributedDataParallel(net, process_group=groups[dist.get_rank()])
    handle = gradzip.attach(model, timeout=TIMEOUT)
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(dist.get_rank()))
    model(x).square().mean().backward()
    ours = net.weight.grad
    net.weight.grad = None
    net(x).square().mean().backward()
    exact, counted = torch.equal(ours, net.weight.grad), handle.stats()
    handle.detach()
    lossy = coded_alone(net, groups[dist.get_rank()], x)
    return exact and counted["bytes_sent"] == 0 and counted["steps"] == 1 and lossy


def coded_alone(net: nn.Linear, group: dist.ProcessGroup, x: torch.Tensor) -> bool:
    """A lossy codec leaves a single rank's gradient as it is, unless it is asked to code; dgc gives a momentum."""
    seen = {}
    for codec, asked in (("topk:ratio=0.1", "0"), ("topk:ratio=0.1", "1"), ("powersgd:rank=1", "0"), ("dgc", "0")):
        os.environ[ALONE] = asked
        model = DistributedDataParallel(net, process_group=group)
        handle = gradzip.attach(model, policy=Fixed(codec), timeout=TIMEOUT)
        for _ in range(2):
            net.zero_grad()
            model(x).square().mean().backward()
        seen[codec, asked] = net.weight.grad
        handle.detach()
    del os.environ[ALONE]
    net.zero_grad()
    net(x).square().mean().backward()
    same = [key for key, gradient in seen.items() if torch.equal(gradient, net.weight.grad)]
    return same == [("topk:ratio=0.1", "0"), ("powersgd:rank=1", "0")]


def mistakes() -> dict[str, str]:
    model, twins = DistributedDataParallel(nn.Linear(64, 32)), nn.Linear(2, 2)
    twins.module = nn.Linear(2, 2)
    cases: dict[str, Callable[[], object]] = {
        "names": lambda: gradzip.attach(DistributedDataParallel(twins)),
        "bare": lambda: gradzip.attach(nn.Linear(2, 2)),  # type: ignore[arg-type]
        "near": lambda: gradzip.attach(model, None, "gcomp"),
        "codec": lambda: gradzip.attach(model, None, "powersdg"),
        "route": lambda: gradzip.attach(model, None, Fixed("topk/allreduce")),
        "device": lambda: gradzip.attach(model, None, Fixed("topk@gpu")),
    }
    out = {}
    for name, case in cases.items():
        with pytest.raises(Unsupported) as caught:
            case()
        out[name] = str(caught.value)
    handle = gradzip.attach(model)
    with pytest.raises(Unsupported) as caught:
        gradzip.attach(model)
    out["twice"] = str(caught.value)
    with pytest.raises(Unsupported) as caught:
        handle.set_policy("gcomp")
    out["set_policy"] = str(caught.value)
    with pytest.warns(gradzip.GradzipWarning, match="3 ranks"):
        handle.load_state_dict(handle.state_dict() | {"world_size": 3})
    return out


def various(rank: int) -> dict[str, Any]:
    return {
        "skipped": {name: skipped_step(name) for name in FEEDBACK},
        "changed": changed_policy(),
        "odd_layouts": odd_layouts(),
        "lost": {name: nothing_is_lost(name) for name in FEEDBACK},
        "sixteen_bits": sixteen_bits(),
        "loss_scale": loss_scale(),
        "alone": alone(),
        "mistakes": mistakes(),
    }


@pytest.fixture(scope="module")
def varied() -> list[dict[str, Any]]:
    return run_ranks(2, various)


@pytest.mark.parametrize("name", FEEDBACK)
def test_a_step_that_is_not_finite_leaves_no_trace(varied: list[dict[str, Any]], name: str) -> None:
    for rank in (0, 1):
        seen = varied[rank]["skipped"][name]
        assert not seen["finite"], "the gradients look good on a rank although one rank had a NaN"
        assert seen["kept"], "residuals or factors of a failed step were kept"
        assert seen["held"] > 2
        assert seen["steps"] == (2, 3)
        assert seen["good"]


def test_policy_can_change_and_be_taken_off(varied: list[dict[str, Any]]) -> None:
    for rank in (0, 1):
        assert varied[rank]["changed"] == {"held": 3, "left": 0, "detached": True, "attached": True, "steps": 2}


def test_gradients_need_not_lie_in_row_major_order(varied: list[dict[str, Any]]) -> None:
    for rank in (0, 1):
        assert [policy for policy, good in varied[rank]["odd_layouts"].items() if not good] == []


@pytest.mark.parametrize("name", FEEDBACK)
def test_what_is_held_back_is_sent_later(varied: list[dict[str, Any]], name: str) -> None:
    limit = 3e-5 if name == "mixed" else 1e-5  # near mode at one ulp rounds twice, and holds nothing back
    assert max(v["lost"][name] for v in varied) < limit


def test_sixteen_bit_gradients_are_summed_in_full(varied: list[dict[str, Any]]) -> None:
    assert all(v["sixteen_bits"] == [True, True, True] for v in varied)


def test_residuals_follow_the_loss_scale(varied: list[dict[str, Any]]) -> None:
    assert all(v["loss_scale"] < 1e-6 for v in varied)


def test_a_group_of_one(varied: list[dict[str, Any]]) -> None:
    assert all(v["alone"] for v in varied)


def test_mistakes_are_named_at_once(varied: list[dict[str, Any]]) -> None:
    said = varied[0]["mistakes"]
    assert "two parameters are called 'weight'" in said["names"]
    assert "DistributedDataParallel" in said["bare"]
    assert "optimizer" in said["near"]
    assert "Did you mean 'powersgd'" in said["codec"]
    assert "alltoall" in said["route"]
    assert "CPU" in said["device"]
    assert "set_policy" in said["twice"]
    assert "optimizer" in said["set_policy"]
