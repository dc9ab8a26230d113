"""experiments/workers: W simulated workers are W real processes under DDP with attach, bit for bit."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import TIMEOUT, run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradzip
from gradzip import Accordion, Fixed, Rules
from gradzip.codecs import Context, parse
from gradzip.optim import EFMomentum
from gradzip.policy import as_policy

sys.path.append(str(Path(__file__).parent.parent / "experiments"))
from workers import rounding, running, stacked
from workers.exact import ExactWorkers
from workers.pictures import for_workers
from workers.stacked import StackedWorkers
from workers.training import WorkerGradients, set_rate

STEPS = 3

POLICIES: dict[str, Callable[[], Any]] = {
    "lossless": lambda: Fixed("gcomp:mode=lossless"),
    "near": lambda: "gcomp",
    "near, own near": lambda: "gcomp:own=near",
    "near-4096": lambda: "gcomp:ulps=4096",
    "near, own lossless": lambda: "gcomp:own=lossless",
    "near-4096, own lossless": lambda: "gcomp:ulps=4096,own=lossless",
    "near-4096-forgets": lambda: "gcomp:ulps=4096,feedback=false",
    "paper": lambda: "gcomp:mode=paper",
    "keep-7": lambda: "gcomp:keep=7",
    "keep-3": lambda: "gcomp:keep=3",
    "18 bits cut": lambda: "gcomp:keep=5,round=truncate,feedback=false",
    "cast": lambda: "cast",
    "powersgd": lambda: "powersgd:rank=2",
    "topk": lambda: "topk:ratio=0.05",
    "randomk": lambda: "randomk:ratio=0.05",
    "randomblock": lambda: "randomblock:ratio=0.05",
    "sign": lambda: "sign",
    "accordion": lambda: Accordion("powersgd:rank=4", "powersgd:rank=2", epochs=1, lr_drop=1.0),
    "accordion-ulps": lambda: Accordion("gcomp", "gcomp:ulps=4096", window=2),
    "mixed": lambda: Rules({"0.*": "powersgd:rank=2", "3.*": "topk:ratio=0.1", "8.*": "gcomp"}),
}
REAL = ["lossless", "near", "near, own lossless", "near-4096", "powersgd", "topk", "sign", "accordion"]
NEAR = [name for name in POLICIES if "near" in name or name in ("accordion-ulps", "mixed", "paper")]
LINEAR = {
    "plain": "identity",
    "rank 2": "powersgd:rank=2",
    "random k": "randomk:ratio=0.05",
    "random block": "randomblock:ratio=0.05",
    "accordion": "accordion ~ powersgd:rank=4 ~ powersgd:rank=2 ~ epochs=1,lr_drop=1",
}


def network() -> nn.Module:
    torch.manual_seed(3)
    convolutions = (nn.Conv2d(3, 48, 3), nn.BatchNorm2d(48), nn.ReLU(), nn.Conv2d(48, 16, 3), nn.BatchNorm2d(16))
    return nn.Sequential(*convolutions, nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, 10))


def optimizer_of(name: str, parameters: Any) -> torch.optim.Optimizer:
    if name in NEAR:
        return torch.optim.AdamW(parameters, lr=1e-3)
    return EFMomentum(parameters, lr=0.05, momentum=0.9, weight_decay=1e-4)


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 3, 10, 10, generator=rng), torch.randint(10, (4,), generator=rng)


def rate_at(name: str, step: int) -> float:
    return (1e-3 if name in NEAR else 0.05) * (0.1 if step >= 2 else 1.0)


def train_ddp(rank: int, names: list[str]) -> dict[str, list[torch.Tensor]]:
    """One real rank: parameters and buffers after a few steps under each policy."""
    ended, handles = {}, []  # handles that live at the same time share their connections
    for name in names:
        model = DistributedDataParallel(network(), bucket_cap_mb=0.01)
        optimizer = optimizer_of(name, model.parameters())
        handle = gradzip.attach(model, optimizer, POLICIES[name](), timeout=TIMEOUT)
        for step in range(STEPS):
            set_rate(optimizer, rate_at(name, step))
            x, y = batch(step, rank)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            handle.end_epoch()
        ended[name] = [value.clone() for value in model.module.state_dict().values()]
        handles.append(handle)
    for handle in handles:
        handle.detach()
    return ended


def train_simulated(
    name: str, world: int, kind: Any, probe: bool = False, device: str = "cpu", graph: bool = False
) -> list[torch.Tensor]:
    model = network().to(device)
    optimizer = optimizer_of(name, model.parameters())
    workers = kind(model, optimizer, as_policy(POLICIES[name]()), world)
    at_once = isinstance(workers, StackedWorkers)
    names = [n for n, _ in model.named_parameters()]
    rows = workers.rows if at_once else [[torch.zeros_like(p) for p in model.parameters()] for _ in range(world)]

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(x), y)

    gradients = WorkerGradients(model, loss_of, rows, graph)
    for step in range(STEPS):
        set_rate(optimizer, rate_at(name, step))
        batches = [batch(step, worker) for worker in range(world)]
        gradients((x.to(device), y.to(device)) for x, y in batches)
        if at_once:
            found = workers.mean(probe)
            assert not found or 0 < found["own_bytes"] < 4.2 * found["values"]
        else:
            means = workers.mean([dict(zip(names, row)) for row in rows])
            for n, p in model.named_parameters():
                p.grad = means[n]
        optimizer.step()
        workers.end_epoch()
    if not at_once:
        workers.close()
    return [value.cpu().clone() for value in model.state_dict().values()]


by_tensor = partial(ExactWorkers, by_tensor=True)  # as tables are made


@pytest.fixture(scope="module")
def single_thread() -> Any:
    """As the processes have it: the order of sums inside convolutions depends on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def real() -> dict[str, list[torch.Tensor]]:
    """Rank 0 of three real ones; three, so that a mean is no shift of exponents."""
    ranks = run_ranks(3, train_ddp, REAL)
    return ranks[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", REAL)
def test_simulated_workers_are_real_ranks(name: str, real: dict[str, list[torch.Tensor]], single_thread: None) -> None:
    simulated = train_simulated(name, 3, ExactWorkers)
    assert len(simulated) == len(real[name])
    for here, there in zip(simulated, real[name]):
        assert torch.equal(here, there)
    start = list(network().state_dict().values())
    assert not torch.equal(simulated[0], start[0]), "nothing was trained"


@pytest.mark.parametrize(("name", "world"), [*((name, 4) for name in POLICIES), ("near-4096", 16), ("powersgd", 3)])
def test_stacked_workers_are_exact_ones(name: str, world: int, single_thread: None) -> None:
    exact = train_simulated(name, world, by_tensor)
    for here, there in zip(train_simulated(name, world, StackedWorkers, probe=True), exact):
        assert torch.equal(here, there)


def test_rank_1_is_the_same_but_for_rounding(monkeypatch: pytest.MonkeyPatch, single_thread: None) -> None:
    """A library multiplies one matrix by a vector in another order than several at once."""
    monkeypatch.setitem(POLICIES, "rank 1", lambda: "powersgd:rank=1")
    exact = train_simulated("rank 1", 4, by_tensor)
    for here, there in zip(train_simulated("rank 1", 4, StackedWorkers), exact):
        torch.testing.assert_close(here, there, rtol=1e-4, atol=1e-6)


def test_replicas_see_different_data(single_thread: None) -> None:
    """More workers are not the same as one: the comparison above could otherwise not fail."""
    assert not torch.equal(train_simulated("near", 4, StackedWorkers)[0], train_simulated("near", 3, StackedWorkers)[0])


PATTERNS = st.one_of(st.integers(0, 2**32 - 1), st.sampled_from([0, 1 << 31, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 1]))


@settings(deadline=None)
@given(st.lists(PATTERNS, min_size=1, max_size=60), st.integers(0, 23), st.booleans())
def test_keep_is_the_codecs(patterns: list[int], bits: int, truncate: bool) -> None:
    x = torch.tensor(patterns).to(torch.int32).view(torch.float32)
    codec = parse(f"gcomp:keep={bits},round={'truncate' if truncate else 'nearest'}")
    decoded = codec.decode(codec.encode(x))
    assert _same_or_nan(rounding.keep(x, bits, truncate), decoded)


@settings(deadline=None)
@given(st.lists(st.tuples(PATTERNS, st.integers(-128, 103)), min_size=1, max_size=60), st.integers(0, 6))
def test_near_is_the_codecs(cases: list[tuple[int, int]], shift: int) -> None:
    x = torch.tensor([pattern for pattern, _ in cases]).to(torch.int32).view(torch.float32)
    floors = torch.tensor([floor for _, floor in cases], dtype=torch.int8)
    codec, context = parse("gcomp"), Context(floor=floors, shift=shift)
    assert _same_or_nan(rounding.near(x, floors, shift), codec.decode(codec.encode(x, context), context))


@settings(deadline=None)
@given(st.lists(st.tuples(PATTERNS, st.floats(0, 2.0**80, width=32)), min_size=1, max_size=60))
def test_paper_is_the_codecs(cases: list[tuple[int, float]]) -> None:
    patterns = [pattern for pattern, _ in cases]
    x = torch.tensor(patterns).to(torch.int32).view(torch.float32)
    x = torch.where(x.isfinite() & (x.abs() >= 2.0**83), 1.0, x)  # the codec cuts fewer bits of what is larger
    reach = torch.tensor([reach for _, reach in cases])
    codec, context = parse("gcomp:mode=paper"), Context(floor=reach)
    assert _same_or_nan(rounding.paper(x, reach), codec.decode(codec.encode(x, context), context))


@pytest.mark.parametrize("name", LINEAR)
def test_one_worker_stands_for_all_where_codecs_are_linear(name: str, single_thread: None) -> None:
    """Parameters and running statistics, after a few steps; the net's batch norms see each worker's batch alone."""
    assert stacked.linear(running.policy_of(LINEAR[name]))
    for together, apart in zip(_trained(LINEAR[name], True), _trained(LINEAR[name], False)):
        torch.testing.assert_close(together, apart, rtol=1e-4, atol=1e-5)


def _trained(text: str, as_one: bool, world: int = 4) -> list[torch.Tensor]:
    model = network()
    if as_one:
        for_workers(model, world)
    optimizer = EFMomentum(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    workers = StackedWorkers(model, optimizer, running.policy_of(text), 1 if as_one else world)
    gradients = WorkerGradients(model, lambda x, y: nn.functional.cross_entropy(model(x), y), workers.rows, False)
    for step in range(STEPS):
        batches = [batch(step, worker) for worker in range(world)]
        gradients([tuple(torch.cat(part) for part in zip(*batches))] if as_one else batches)
        workers.mean()
        optimizer.step()
        workers.end_epoch()
    return list(model.state_dict().values())


@pytest.mark.parametrize("text", ["topk:ratio=0.1", "sign", "gcomp", "randomk:ratio=0.1,unbiased=true", "cast"])
def test_codecs_that_need_each_worker_are_not_linear(text: str) -> None:
    assert not stacked.linear(as_policy(text))
    assert not stacked.linear(Accordion("powersgd:rank=2", text))


def _same_or_nan(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.isnan(), b.isnan()) and same_bits(a.nan_to_num(nan=0.0), b.nan_to_num(nan=0.0))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["near-4096", "keep-3", "powersgd", "topk", "sign", "accordion-ulps"])
def test_replayed_graphs_compute_what_is_computed_without(name: str) -> None:
    """Real frames are compared on the way, where there are some."""
    plainly = train_simulated(name, 4, StackedWorkers, probe=True, device="cuda")
    for here, there in zip(train_simulated(name, 4, StackedWorkers, True, "cuda", graph=True), plainly):
        torch.testing.assert_close(here, there, rtol=1e-3, atol=1e-4)
