"""What differs on one rank, and tensors as nobody expects them: a clear error soon, or the right result."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import emulated
import pytest
import streams
import torch
import torch.distributed as dist
from conftest import same_bits
from ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradzip
from gradzip import Unsupported
from gradzip.exchange.on_stream.runner import StreamRunner

LONG = timedelta(seconds=150)
needs_emulator = pytest.mark.skipif(emulated.COMPILER is None, reason="needs g++")
RUNNERS = ["host", pytest.param("stream", marks=needs_emulator)]
DIFFERING = {  # of rank 1 alone, and what is said
    "names": "ranks disagree",
    "buckets": "ranks disagree",
    "torch": "on streams with torch 2.99",
    "frozen": "ranks disagree",
}


def quiet(runner: str) -> None:
    logging.getLogger("gradzip").setLevel(logging.WARNING)
    if runner == "stream":
        streams.install()


def differing(rank: int, runner: str, policy: str) -> dict[str, str]:
    quiet(runner)
    policy = "int8" if runner == "stream" and policy != "noise" else policy
    said, version = {}, torch.__version__
    for what in DIFFERING:
        here = what if rank == 1 else ""
        torch.manual_seed(0)
        layers = [nn.Linear(40, 60), nn.Linear(60, 50), nn.Linear(50, 40)]
        names = "abc" if here == "names" else "xyz"
        net = nn.Sequential(OrderedDict(zip(names, layers)))
        if here == "torch":
            torch.__version__ = "2.99.0"
        began = time.monotonic()
        try:
            if here == "frozen":
                net[0].bias.requires_grad_(False)
            cap, unused = 0.005 if here == "buckets" else 25, what == "buckets"  # else all ranks do as rank 0 has it
            # A group for each: when backward breaks off, a rank may have asked DDP's for more than the other has.
            group = dist.new_group()
            model = DistributedDataParallel(net, process_group=group, bucket_cap_mb=cap, find_unused_parameters=unused)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            handle = gradzip.attach(model, optimizer, gradzip.Fixed(policy), timeout=LONG)
            for _ in range(4):
                model(torch.ones(2, 40)).square().sum().backward()
            handle.stats()
            handle.detach()
            said[what] = "went on"
        except RuntimeError as error:
            said[what] = str(error)
        torch.__version__ = version
        took = time.monotonic() - began
        assert took < LONG.total_seconds() / 2, f"{what}: it waited for the timeout, {took:.0f} s"
        dist.monitored_barrier(timeout=LONG)
    return said


@pytest.mark.timeout(620)
@pytest.mark.parametrize("policy", ["noise", "gcomp:mode=lossless"])
@pytest.mark.parametrize("runner", RUNNERS)
def test_what_differs_on_one_rank_is_told_on_all(runner: str, policy: str) -> None:
    for said in run_ranks(2, differing, runner, policy, deadline=600):
        for what, words in DIFFERING.items():
            if what == "frozen":
                assert said[what] != "went on", "DDP or gradzip says so"
            elif what == "torch" and runner == "host":
                assert said[what] == "went on", "results do not depend on it there"
            else:
                assert words in said[what], what


# --- Tensors ----------------------------------------------------------------------------------------------------------


POLICIES = ["noise", "cast", "identity", "int8", "int4:block=128,hadamard=true", "fp8"]


class Odd(nn.Module):
    """Parameters as layers seldom have them; the gradient of each is what the rank wants it to be."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        sizes = {"one": (1,), "two": (2,), "empty": (0, 3), "scalar": (), "odd": (33, 5), "large": (60, 70)}
        for name, size in sizes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(size, dtype=dtype)))
        for name in ("zeros", "subnormal", "giant"):
            self.register_parameter(name, nn.Parameter(torch.zeros(20, 30, dtype=dtype)))
        self.last = nn.Parameter(torch.zeros(2, 8, 3, 3, dtype=dtype).to(memory_format=torch.channels_last))
        self.turned = nn.Parameter(torch.zeros(30, 20, dtype=dtype).t())

    def forward(self, wanted: dict[str, torch.Tensor]) -> torch.Tensor:
        return sum((p * wanted[name]).sum() for name, p in self.named_parameters())  # type: ignore[return-value]


def wanted_of(rank: int, step: int, net: Odd) -> dict[str, torch.Tensor]:
    draw, found = torch.Generator().manual_seed(100 * step + rank), {}
    for name, p in net.named_parameters():
        x = torch.randn(p.shape, generator=draw)
        if name == "zeros":
            x = torch.zeros(p.shape)
        elif name == "subnormal" and p.dtype != torch.float16:
            x *= 1e-40
        elif name == "giant":
            x.view(-1)[7 * rank] = 3e4 if p.dtype == torch.float16 else 1e30
        found[name] = x.to(p.dtype)
    return found


def odd(rank: int, runner: str, policies: list[str], dtypes: list[torch.dtype]) -> dict[str, torch.Tensor]:
    quiet(runner)
    found = {}
    for policy in policies:
        for dtype in dtypes:
            net = Odd(dtype)
            model = DistributedDataParallel(net, bucket_cap_mb=0.01)
            chosen = gradzip.Rules({"*": policy}, small=True)
            handle = gradzip.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), chosen, timeout=LONG)
            for step in range(2):
                model.zero_grad()
                model(wanted_of(rank, step, net)).backward()
                handle.stats()
                for name, p in net.named_parameters():
                    assert p.grad is not None
                    found[f"{policy} {dtype} {step} {name}"] = p.grad.contiguous().clone()
            handle.detach()
    return found


@pytest.mark.timeout(620)
@needs_emulator
@pytest.mark.parametrize(
    ("world", "policies", "dtypes"),
    [(2, POLICIES, [torch.float32]), (5, ["noise", "int4:block=128,hadamard=true"], [torch.bfloat16, torch.float16])],
)
def test_odd_tensors_become_their_mean_alike_on_both_runners(
    world: int, policies: list[str], dtypes: list[torch.dtype]
) -> None:
    found = {runner: run_ranks(world, odd, runner, policies, dtypes, deadline=300) for runner in ("host", "stream")}
    first = found["host"][0]
    for runner, ranks in found.items():
        for rank, seen in enumerate(ranks):
            for case, x in seen.items():
                assert same_bits(x, first[case]), f"{case} by the {runner} runner on rank {rank}"
    for case, x in first.items():
        policy, kind, step, name = case.split()
        dtype = getattr(torch, kind.removeprefix("torch."))
        each = [wanted_of(rank, int(step), Odd(dtype))[name].double() for rank in range(world)]
        mean, most = torch.stack(each).mean(0), max((float(x.abs().max()) for x in each if x.numel()), default=0.0)
        if name == "zeros":
            assert not x.any(), case
        assert bool(x.isfinite().all()), case
        # One value has all of the error that the codec may make of its tensor's largest.
        room = {"noise": 2.0, "cast": 0.01, "identity": 1e-3, "int8": 0.05, "fp8": 0.3}.get(policy, 0.6)
        if x.numel():
            assert float((x.double() - mean).abs().max()) <= room * most + 1e-37, case


def wide(rank: int, runner: str) -> dict[str, str]:
    """Values of 64 bits: refused where a codec does not know them, or averaged as they are."""
    quiet(runner)
    said = {}
    for policy in POLICIES:
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Linear(30, 30).double())
        try:
            handle = gradzip.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), gradzip.Fixed(policy))
        except Unsupported as error:
            said[policy] = str(error)
            continue
        x = torch.randn(4, 30, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
        model(x).square().sum().backward()
        (grad,) = [p.grad for p in model.parameters() if p.grad is not None and p.dim() == 2]
        exact = [torch.empty_like(grad) for _ in range(dist.get_world_size())]
        with model.no_sync():
            model.zero_grad()
            model(x).square().sum().backward()
        (own,) = [p.grad for p in model.parameters() if p.grad is not None and p.dim() == 2]
        dist.all_gather(exact, own)
        mean = torch.stack(exact).mean(0)
        said[policy] = f"{float((grad - mean).norm() / mean.norm()):.0e}"
        handle.detach()
    return said


@pytest.mark.parametrize("runner", RUNNERS)
def test_values_of_64_bits_are_refused_or_kept(runner: str) -> None:
    for said in run_ranks(2, wide, runner):
        for policy, words in said.items():
            if policy == "identity":
                assert float(words) < 1e-15, policy
            elif policy == "cast":
                assert float(words) < 1e-2, policy
            else:
                assert "float64" in words, policy


def test_a_graph_capture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    runner: Any = SimpleNamespace(_device=torch.device("cuda", 0))
    with pytest.raises(Unsupported, match="CUDA graph"):
        StreamRunner.begin(runner, 0)
