"""The host runner with models on a GPU: what test_from_device.py checks on emulated kernels, on real ones."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from ranks import TIMEOUT, run_ranks
from test_from_device import (
    DECODED,
    GCOMP,
    GENERIC,
    GPU_ALL_TO_ALL,
    check_damaged,
    check_finite,
    exchanged,
    expected_of,
    on_gpu,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import same

import gradzip
from gradzip.exchange.on_host import streams
from gradzip.exchange.on_host.backward import HostBackward
from gradzip.routes import NAMED

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]
CYCLES = 20_000_000  # about 10 ms
BY_HOST = ("gcomp:mode=lossless", "gcomp:keep=7", "gcomp", "gcomp:keep=3")
BY_STREAMS_TOO = ("topk:ratio=0.1", "randomk:ratio=0.2", "powersgd:rank=2", "int8")


def check(world: int, codecs: Sequence[str], routes: Sequence[str], dtype: torch.dtype = torch.float32) -> None:
    cases, per_host = [(codec, route, dtype) for codec in codecs for route in routes], 2 if world == 4 else 1
    expected = expected_of(cases, world, per_host)
    for found in run_ranks(world, exchanged, cases, expected, per_host, 2000, "cuda", deadline=800):
        assert found["wrong"] == []


@pytest.mark.parametrize("codec", [*GCOMP, "gcomp:ulps=4096", "gcomp:own=lossless"])
def test_gcomp_has_the_bits_of_the_interpreter(codec: str) -> None:
    check(3, [codec], [GPU_ALL_TO_ALL])


@pytest.mark.parametrize("codec", [*GENERIC, "dgc:ratio=0.1", "zstd", "lz4"])
def test_other_codecs_have_them_too(codec: str) -> None:
    check(2, [codec], [GPU_ALL_TO_ALL])


def test_gradients_of_16_bits_have_them_too() -> None:
    check(2, ["gcomp:mode=lossless", "identity", "zlib"], [GPU_ALL_TO_ALL], torch.bfloat16)


def test_routes_have_them_too() -> None:
    check(4, ["gcomp:keep=7"], [on_gpu(name) for name in NAMED if NAMED[name].compresses])
    check(4, ["identity"], ["allreduce"])


def test_routes_that_code_on_the_cpu_have_them_too() -> None:
    check(3, ["gcomp:keep=3", "gcomp:mode=near", "topk:ratio=0.1"], [str(NAMED["alltoall"].on("cpu"))])


def delayed(rank: int, cases: Any, expected: Any, per_host: int = 1) -> dict[str, Any]:
    """Every stream is late: memory that is used again too early shows."""
    after = streams.DeviceStream.after

    def late(self: streams.DeviceStream, mark: streams.Mark) -> None:
        after(self, mark)
        torch.cuda._sleep(CYCLES * (1 + (rank + id(self) // 64) % 3))  # type: ignore[no-untyped-call]

    streams.DeviceStream.after = late  # type: ignore[method-assign]
    return exchanged(rank, cases, expected, per_host, 2000, "cuda")


@pytest.mark.parametrize("codec", ["gcomp:keep=7", "gcomp:keep=3", "gcomp:mode=near", "topk:ratio=0.1", "sign"])
def test_kernels_that_are_late_change_nothing(codec: str) -> None:
    cases = [(codec, GPU_ALL_TO_ALL, torch.float32)]
    for found in run_ranks(2, delayed, cases, expected_of(cases, 2, 1, steps=6), deadline=800):
        assert found["wrong"] == []


def test_kernels_that_are_late_change_nothing_by_routes_of_many_stages() -> None:
    """There values of one stream are read by another, and frames are passed on."""
    cases = [("gcomp:keep=3", on_gpu(name), torch.float32) for name in ("hierarchical", "ring")]
    for found in run_ranks(4, delayed, cases, expected_of(cases, 4, 2, steps=6), 2, deadline=800):
        assert found["wrong"] == []


@pytest.mark.parametrize("route", DECODED)
def test_a_damaged_body_names_the_rank_that_sent_it(route: str) -> None:
    check_damaged(route, "cuda")


def test_whether_means_are_finite_is_asked_before_ddp_goes_on() -> None:
    check_finite("cuda")


# --- By attach -------------------------------------------------------------------------------------------------------


def trained(rank: int, policy: Any, device: str) -> dict[str, Any]:
    os.environ.pop("GRADZIP_ENGINE", None)  # the right one for each device
    torch.cuda.set_device(0)
    torch.manual_seed(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    net = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 128)).to(device)
    model = DistributedDataParallel(net, bucket_cap_mb=0.3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    handle = gradzip.attach(model, optimizer, policy, timeout=TIMEOUT)
    losses = []
    for number in range(12):
        draw = torch.Generator().manual_seed(100 * number + rank)
        optimizer.zero_grad()
        loss = model(torch.randn(32, 128, generator=draw).to(device)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    stats = handle.stats()
    handle.detach()
    return {"losses": losses, "parameters": [p.detach().cpu() for p in net.parameters()], "runner": stats["runner"]}


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:gloo"])
@pytest.mark.parametrize("policy", [*BY_HOST, *BY_STREAMS_TOO])
def test_attach_trains_as_on_the_cpu_with_identical_replicas(policy: str, backend: str) -> None:
    on_cpu = run_ranks(4, trained, policy, "cpu", deadline=400)
    on_gpu = run_ranks(4, trained, policy, "cuda", deadline=400, backend=backend)
    for found in on_gpu:
        assert found["runner"] == ("stream" if policy in BY_STREAMS_TOO and backend == "nccl" else "host")
        assert same(found["parameters"], on_gpu[0]["parameters"])
    assert on_cpu[0]["runner"] == "host"
    assert on_gpu[0]["losses"] == pytest.approx(on_cpu[0]["losses"], rel=2e-2)


def test_what_torch_averages_comes_to_the_same_on_a_gpu() -> None:
    """Its first step waits for all ranks to agree, the others do not."""
    policy = gradzip.Fixed("identity")
    on_cpu = run_ranks(4, trained, policy, "cpu", deadline=400)
    on_gpu = run_ranks(4, trained, policy, "cuda", deadline=400, backend="nccl")
    for found in on_gpu:
        assert found["runner"] == "torch"
        assert same(found["parameters"], on_gpu[0]["parameters"])
    assert on_gpu[0]["losses"] == pytest.approx(on_cpu[0]["losses"], rel=2e-2)


def poisoned(rank: int) -> dict[str, Any]:
    """Gradients are set to zero in DDP's buckets as soon as backward returns, while the host runner still waits."""
    os.environ.pop("GRADZIP_ENGINE", None)
    torch.cuda.set_device(0)
    wait, early = streams.DeviceStream.wait, []

    def late(self: streams.DeviceStream) -> None:
        wait(self)
        time.sleep(0.02)

    follow = HostBackward._means_follow

    def noted(self: HostBackward) -> None:
        follow(self)
        early.append(self.gave_early)

    streams.DeviceStream.wait, HostBackward._means_follow = late, noted  # type: ignore[method-assign]
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 128)).cuda()
    model = DistributedDataParallel(net, bucket_cap_mb=0.3, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    handle = gradzip.attach(model, optimizer, "gcomp:keep=3", timeout=TIMEOUT)
    kept, finite = [], []
    for number in range(8):
        draw = torch.Generator().manual_seed(100 * number + rank)
        loss = model(torch.randn(32, 128, generator=draw).cuda()).square().mean()
        (loss * float("nan") if number == 5 and rank == 1 else loss).backward()
        sums = torch.stack([p.grad.sum() for p in model.parameters() if p.grad is not None])
        optimizer.zero_grad(set_to_none=False)
        finite.append(bool(sums.isfinite().all()))
        state = handle.state_dict()
        kept.append({key: torch.as_tensor(value) for key, value in state.items() if "residual/" in key})
    handle.detach()
    return {
        "finite": finite,
        "early": any(early),
        "changed": [
            any(not torch.equal(before[key], after[key]) for key in before)
            for before, after in itertools.pairwise(kept)
        ],
    }


def test_a_step_that_is_not_finite_leaves_no_residuals_whatever_ddp_does_meanwhile() -> None:
    for found in run_ranks(2, poisoned, deadline=400, backend="nccl"):
        assert found["early"]
        assert found["finite"] == [number != 5 for number in range(8)]
        assert found["changed"] == [number != 5 for number in range(1, 8)]
