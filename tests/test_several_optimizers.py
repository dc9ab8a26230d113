"""A model whose parts are stepped by several optimizers."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest
import torch
from ranks import TIMEOUT, run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer
from training import same

import gradzip
from gradzip import Fixed, Floor, GradzipWarning
from gradzip.exchange.topology import Topology
from gradzip.hooks.ways import Ways
from gradzip.sensitivity import reaches, rules

NEAR = Fixed("gcomp:ulps=16")


def net() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 32))


def two_optimizers(model: nn.Sequential) -> list[Optimizer]:
    """The last layer is in none."""
    return [AdamW(model[0].parameters(), lr=1e-3), SGD(model[2].parameters(), lr=0.05, momentum=0.9)]


def ways_of(model: nn.Module, optimizers: list[Optimizer]) -> Ways:
    names: dict[torch.Tensor, str] = {p: name for name, p in model.named_parameters()}
    return Ways(names, torch.device("cpu"), optimizers, Topology(0, ((0,),)))


def test_rules_come_from_the_optimizer_that_holds_a_parameter() -> None:
    model = net()
    optimizers = two_optimizers(model)
    ways = ways_of(model, optimizers)
    found = ways.of(NEAR, 1.0)
    for layer, optimizer in (("0", optimizers[0]), ("2", optimizers[1])):
        expected = rules(optimizer, 16)
        for kind in ("weight", "bias"):
            floor, rule = found[f"{layer}.{kind}"].floor, expected[model.get_parameter(f"{layer}.{kind}")]
            assert isinstance(floor, Floor)
            assert rule is not None
            assert torch.equal(floor.tensor(), rule.tensor())
    assert found["4.weight"].floor is None
    assert found["4.weight"].codec.lossless
    assert ways.unheld() == ["4.weight", "4.bias"]


def test_paper_mode_asks_all_optimizers() -> None:
    model = net()
    optimizers = two_optimizers(model)
    found = ways_of(model, optimizers).of(Fixed("gcomp:mode=paper"), 1.0)
    for layer, optimizer in (("0", optimizers[0]), ("2", optimizers[1])):
        weight = model.get_parameter(f"{layer}.weight")
        floor = found[f"{layer}.weight"].floor
        assert isinstance(floor, torch.Tensor)
        assert torch.equal(floor, reaches(optimizer)[weight].view(-1))


def test_a_parameter_that_two_optimizers_step_stays_lossless() -> None:
    model = net()
    optimizers = [AdamW(model.parameters(), lr=1e-3), SGD(model[0].parameters(), lr=0.05)]
    found = ways_of(model, optimizers).of(NEAR, 1.0)
    assert [name for name, way in found.items() if way.codec.lossless] == ["0.weight", "0.bias"]
    assert found["2.weight"].floor is not None


def attached(model: DistributedDataParallel, optimizers: Any, policy: Any) -> tuple[gradzip.Handle, list[str]]:
    lines: list[str] = []
    heard = logging.Handler()
    heard.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gradzip").addHandler(heard)
    handle = gradzip.attach(model, optimizers, policy, timeout=TIMEOUT)
    logging.getLogger("gradzip").removeHandler(heard)
    return handle, [line for line in lines if "no optimizer" in line]


def trained(rank: int) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for case, policy in (("plain", None), ("lossless", Fixed("gcomp:mode=lossless")), ("near", NEAR), ("one", NEAR)):
        model = DistributedDataParallel(net())
        optimizers = two_optimizers(model.module)
        held = optimizers[:1] if case == "one" else optimizers
        handle, lines = (None, []) if policy is None else attached(model, held, policy)
        rng = torch.Generator().manual_seed(rank)
        for _ in range(4):
            for optimizer in optimizers:
                optimizer.zero_grad()
            model(torch.randn(8, 20, generator=rng)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
        out[case] = {"parameters": [p.detach().clone() for p in model.parameters()], "lines": lines}
        if handle is not None:
            out[case]["ratio"] = handle.stats()["ratio"]
            handle.detach()
    out["warned"] = raised_late()
    return out


def raised_late() -> list[str]:
    """The second optimizer's learning rate is raised between backward and its step."""
    model = DistributedDataParallel(net())
    optimizers = two_optimizers(model.module)
    handle = gradzip.attach(model, optimizers, NEAR, timeout=TIMEOUT)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", GradzipWarning)
        model(torch.ones(8, 20)).sum().backward()
        optimizers[1].param_groups[0]["lr"] = 1.0
        for optimizer in optimizers:
            optimizer.step()
        handle.detach()
        handle.stats()
    return [str(w.message) for w in caught if issubclass(w.category, GradzipWarning)]


@pytest.fixture(scope="module")
def seen() -> list[dict[str, Any]]:
    return run_ranks(2, trained)


def test_training_with_two_optimizers(seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        assert same(rank["lossless"]["parameters"], rank["plain"]["parameters"])
        assert same(rank["near"]["parameters"], seen[0]["near"]["parameters"]), "replicas differ"
        assert rank["near"]["ratio"] > rank["one"]["ratio"] > 1


def test_rank_0_names_parameters_that_no_optimizer_holds(seen: list[dict[str, Any]]) -> None:
    near, one = seen[0]["near"]["lines"], seen[0]["one"]["lines"]
    assert len(near) == len(one) == 1
    assert near[0].startswith("no optimizer that attach was given holds '4.weight', '4.bias': ")
    assert one[0].startswith("no optimizer that attach was given holds '2.weight', '2.bias', '4.weight' and 1 more: ")
    assert seen[0]["lossless"]["lines"] == [], "a codec that asks no optimizer"
    assert all(seen[1][case]["lines"] == [] for case in ("near", "one"))


def test_the_steps_of_all_optimizers_are_watched(seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        (said,) = rank["warned"]
        assert "the optimizer's lr was 0.05 in backward and is 1.0 in its step" in said


def mistaken(rank: int) -> dict[str, str]:
    model = DistributedDataParallel(net())
    said = {}
    for case, optimizers, policy in (
        ("empty", [], None),
        ("strange", [SGD(model.parameters(), lr=0.1), 3], None),
        ("auto", two_optimizers(model.module), "auto"),
    ):
        with pytest.raises(gradzip.Unsupported) as caught:
            gradzip.attach(model, optimizers, policy)  # type: ignore[arg-type]
        said[case] = str(caught.value)
    return said


def test_lists_that_cannot_work_are_refused() -> None:
    (said,) = run_ranks(1, mistaken)
    assert "an empty list of optimizers" in said["empty"]
    assert "int is no torch.optim.Optimizer" in said["strange"]
    assert "auto plans with one optimizer, and was given 2" in said["auto"]
